"""A machine whose image has an older Varuna: it is told so, as is who looks at the run, which goes on without it."""

import shutil
import subprocess
import sys
from pathlib import Path

import varuna
from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import JOB, environment, python
from tests.waiting import wait_for
from varuna.core.version import __version__

ARGS = ("--steps", "5", "--dropout", "0.1")


def test_an_agent_of_an_older_version_is_refused_where_both_ends_can_read_why(tmp_path: Path) -> None:
    undisturbed = python(*ARGS).losses
    image = tmp_path / "image"
    shutil.copytree(Path(varuna.__file__).parent, image / "varuna", ignore=shutil.ignore_patterns("__pycache__"))
    (image / "varuna" / "core" / "version.py").write_text('__version__ = "0.0.1"\n')
    (tmp_path / "run-here").mkdir()
    cluster = Cluster(tmp_path / "run-here")
    try:
        join = cluster.verb("join-token", "--uses", "9").out.strip()
        command = [
            sys.executable,
            "-m",
            "varuna",
            "agent",
            "--state-dir",
            str(tmp_path / "old"),
            join,
            "--",
            JOB,
            *ARGS,
        ]
        old = subprocess.run(
            command,
            env=environment(PYTHONPATH=str(image)),
            cwd=image,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert old.returncode == 1, old.stderr
        assert f"the manager runs Varuna {__version__}; install the same version here" in old.stderr
        assert "Traceback" not in old.stderr
        wait_for(lambda: f"was not let in: it runs Varuna 0.0.1, the manager {__version__}" in cluster.said())
        agent = cluster.agent("new", *ARGS, join=join)
        assert (ended(agent), ended(cluster.manager)) == (0, 0), cluster.said()
        cluster.check(undisturbed)
    finally:
        cluster.close()
