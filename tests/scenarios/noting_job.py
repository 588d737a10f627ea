"""The job, in a process that notes that it captures a model.

    python noting_job.py FOLDER FAULT [arguments of job.py]

FAULT: ``none``; ``dies``: the first that captures is killed meanwhile; ``hidden``: modules run as written; ``other``:
worker w1 has another model.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import varuna.partition.lengths as captures
from varuna.partition.opaque.met import met

_JOB = str(Path(__file__).with_name("job.py"))


def noting(capture: Any, folder: Path, fault: str) -> Any:
    """``capture``, which leaves a note first."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        with (folder / "captures").open("a") as notes:
            notes.write(f"{os.environ.get('VARUNA_WORKER', 'alone')}\n")
        if fault == "dies" and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hidden":
            met()
        return capture(*args, **kwargs)

    return noted


if __name__ == "__main__":
    fault, arguments = sys.argv[2], sys.argv[3:]
    vars(captures)["partition"] = noting(vars(captures)["partition"], Path(sys.argv[1]), fault)
    if fault == "other" and os.environ.get("VARUNA_WORKER") == "w1":
        arguments += ["--layers", "3"]
    sys.argv = [_JOB, *arguments]
    runpy.run_path(_JOB, run_name="__main__")
