"""``varuna run --on ENGINE`` as its user has it: the command, again after it was killed, and what is seen of it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.scenarios.cluster import CLI
from tests.scenarios.launch import JOB, Done, environment, json_log, run
from tests.scenarios.warm import Process
from tests.waiting import wait_for
from varuna.fleet.run_folder.connection_file import find

ARGS = ("--dropout", "0.1", "--slow", "0.1", "--steps", "100000")
"""Of the job: it ends when somebody stops it."""


class OnEngine:
    """One run; ``close`` ends its managers.

    Args:
        folder: all that is kept lies there.
        flags: of ``varuna run``.
        variables: of the manager's environment.
        args: of the job, in addition to ``ARGS``.
    """

    def __init__(self, folder: Path, *flags: str, variables: Mapping[str, str], args: tuple[str, ...] = ()) -> None:
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "log.jsonl"
        folder.mkdir(exist_ok=True)
        self.environment = environment(XDG_STATE_HOME=str(folder / "state"), **variables)
        own = ["--run-dir", str(self.run_dir), "--json-log", str(self.log), "--workers", "1"]
        self.command = [*CLI, "run", *flags, *own, JOB, *ARGS, *args]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self, *flags: str) -> None:
        """Also again: the same folder continues the run."""
        out = self.folder / f"{len(self.processes)}.out"
        with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            command = [*CLI, "run", *flags, *self.command[len(CLI) + 1 :]]
            self.manager = Process(command, env=self.environment, stdout=stdout, stderr=stderr, start_new_session=True)
        self.processes.append(self.manager)

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait for something, while there is a manager."""

        def is_so() -> bool:
            assert self.manager.poll() is None, self.said()
            return bool(condition())

        wait_for(is_so)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def verb(self, *arguments: str) -> Done:
        extra = {"XDG_STATE_HOME": str(self.folder / "state")}
        return run([*CLI, arguments[0], "--run", str(self.run_dir), *arguments[1:]], **extra)

    def newest(self) -> int:
        """Newest step."""
        lines = json_log(self.log) if self.log.exists() else []
        return lines[-1]["step"] if lines else -1

    def until_steps(self, steps: int) -> None:
        """So many more are done."""
        last = self.newest()
        self.wait(lambda: self.newest() >= last + steps)

    def machines(self) -> int:
        """Return the number of agents that the manager has."""
        return len(json.loads(find(self.run_dir)[1].remote().get("/status").body)["connected"])

    def check(self, undisturbed: dict[int, float]) -> None:
        """Every step up to the newest one is there, and has the loss of one process."""
        log = json_log(self.log)
        assert {line["step"] for line in log} == set(range(max(line["step"] for line in log) + 1)), self.said()
        for line in log:
            assert line["loss"] == pytest.approx(undisturbed.get(line["step"], line["loss"]), rel=1e-5), line

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
