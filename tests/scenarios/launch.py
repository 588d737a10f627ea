"""Starts the job in every way a user would, with bounds, and reads what it said."""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.scenarios.warm import Process

JOB = str(Path(__file__).with_name("job.py"))
BOUND_S = 100
"""Of silence: main workers say something at every step."""
USUAL_STEPS = 60
"""The first test that asks for the losses of one process has so many computed; most tests compare no more."""

Alone = Callable[..., dict[int, float]]
"""The fixture ``alone``: losses of ``job.py`` in one process by step, given the number of steps and options."""


@dataclass
class Done:
    """The end of a command, with its output."""

    code: int
    out: str
    err: str

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step; a redone step counts once, with its newest value."""
        return {int(s): float(v) for s, v in re.findall(r"^step (\d+) loss (\S+)", self.out, re.MULTILINE)}


def environment(**more: str) -> dict[str, str]:
    found = {key: os.environ.get(key) for key in list(os.environ)}  # in a thread, while pytest's own variable goes
    kept = {key: value for key, value in found.items() if value is not None and not key.startswith("VARUNA_")}
    return {**kept, "OMP_NUM_THREADS": "1", "VARUNA_CALIBRATION": "none", **more}


def run(command: list[str], **more: str) -> Done:
    """Run to the end; a command that says nothing for long hangs, while a slow one on a busy machine does not."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with Process(command, stdout=out, stderr=err, env=environment(**more)) as process:
            try:
                _follow(process, (out, err))
            except BaseException:
                process.kill()
                raise
        return Done(process.returncode, _all_of(out), _all_of(err))


def _follow(process: "subprocess.Popen[bytes]", files: Sequence[IO[bytes]]) -> None:
    said, since_s = -1, time.monotonic()
    while process.poll() is None:
        if (now := sum(os.fstat(file.fileno()).st_size for file in files)) > said:
            said, since_s = now, time.monotonic()
        if time.monotonic() > since_s + BOUND_S:
            last = "\n".join(_all_of(file)[-2000:] for file in files)
            raise AssertionError(f"{process.args!r} says nothing for {BOUND_S} s; its last words:\n{last}")
        time.sleep(0.02)


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


def python(*args: str, **more: str) -> Done:
    """``python job.py``."""
    return run([sys.executable, JOB, *args], **more)


def losses_alone(folder: Path, steps: int, *options: str) -> dict[int, float]:
    """Return the losses of one process by step; ``folder`` keeps them for all that ask for the same job.

    A longer run begins with the losses of a shorter one, so the longest that was computed serves all.
    """
    kept = folder / f"alone-{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        losses: list[float] = json.loads(kept.read_text()) if kept.exists() else []
        if len(losses) < steps:
            done = python("--steps", str(max(steps, USUAL_STEPS)), *options)
            assert done.code == 0, done.err
            losses = [done.losses[step] for step in sorted(done.losses)]
            kept.write_text(json.dumps(losses))
    return dict(enumerate(losses[:steps]))


def torchrun(workers: int, *args: str, **more: str) -> Done:
    """``torchrun --nproc-per-node N job.py``."""
    return run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers), JOB, *args], **more)


def varuna_command(workers: int, flags: list[str], *args: str, script: str = JOB) -> list[str]:
    return [sys.executable, "-m", "varuna.cli.main", "run", "--workers", str(workers), *flags, script, *args]


def varuna(workers: int, flags: list[str], *args: str, **more: str) -> Done:
    """``varuna run --workers N job.py``."""
    return run(varuna_command(workers, flags, *args), **more)


def processes_with(text: str) -> list[int]:
    """Processes whose command line contains ``text``, this one apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                zombie = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                continue
            if text in line and not zombie:
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def json_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
