"""A manager and agents on loopback, over real TLS, with a hand on each of their throats."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.launch import BOUND_S, JOB, environment, json_log, run
from tests.scenarios.warm import Process
from tests.waiting import wait_for
from varuna.fleet.run_folder.connection_file import find
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.run_events import RunEvent

CLI = [sys.executable, "-m", "varuna.cli.main"]


class Cluster:
    """Starts and ends processes; ``close`` leaves none behind."""

    def __init__(self, folder: Path, *flags: str, whereabouts: Callable[[str], dict[str, str]] | None = None) -> None:
        """``whereabouts`` gives more of a process's environment, by the name of its machine."""
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "log.jsonl"
        self.whereabouts = whereabouts or (lambda machine: {})
        self.flags = flags
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = environment(XDG_STATE_HOME=str(folder / "state"))
        self.port = 0
        self.manager = self.start_manager()

    def start_manager(self) -> subprocess.Popen[bytes]:
        """Also again: the same folder continues the run."""
        command = ["manager", "--run-dir", str(self.run_dir), "--port", str(self.port), "--json-log", str(self.log)]
        out = self.folder / f"manager-{len(self.processes)}"
        self.manager = self._start([*command, *self.flags], out, "manager")
        wait_for(lambda: b"JOIN" in out.with_suffix(".out").read_bytes())
        self.join = out.with_suffix(".out").read_text().split("JOIN ")[1].split()[0]
        self.port = int(self.join.rpartition(":")[2].partition("/")[0])
        return self.manager

    def agent(
        self,
        name: str,
        *args: str,
        workers: int = 1,
        join: str = "",
        join_file: Path | None = None,
        script: str = JOB,
        flags: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """One more machine; the same name is the same state folder."""
        state = ["--state-dir", str(self.folder / name)]
        out = self.folder / f"{name}-{len(self.processes)}"
        if join_file is not None:
            where = ["--join-file", str(join_file)]
        else:
            where = [join or (self.join if not self.agents else self.verb("join-token").out.strip())]
        return self._start(["agent", *where, "--workers", str(workers), *state, *flags, "--", script, *args], out, name)

    @property
    def agents(self) -> list[Path]:
        return sorted(self.folder.glob("*/agent.json"))

    def _start(self, arguments: list[str], out: Path, machine: str) -> subprocess.Popen[bytes]:
        environment = {**self.environment, **self.whereabouts(machine)}
        with out.with_suffix(".out").open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            process = Process([*CLI, *arguments], env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
        self.processes.append(process)
        return process

    def verb(self, *arguments: str) -> Any:
        """A command of a person."""
        extra = {"XDG_STATE_HOME": str(self.folder / "state"), **self.whereabouts("manager")}
        return run([*CLI, arguments[0], "--run", str(self.run_dir), *arguments[1:]], **extra)

    def verb_at(self, *arguments: str) -> Any:
        """A command that is told where by its own flags."""
        return run([*CLI, *arguments], XDG_STATE_HOME=str(self.folder / "state"))

    def node(self, name: str) -> str:
        identity = json.loads((self.folder / name / "agent.json").read_text())["identity"]
        node: str = identity["node"]
        return node

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(find(self.run_dir)[1].remote().get("/status").body)
        return status

    def said(self) -> str:
        """All that was written to a terminal."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def lines(self) -> list[dict[str, Any]]:
        """The log of steps so far."""
        return json_log(self.log) if self.log.exists() else []

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines()]

    def until_agents(self, count: int) -> None:
        """So many have joined: the next one gets a token of its own."""
        wait_for(lambda: len(self.agents) >= count)

    def until_step(self, step: int, bound_s: float = BOUND_S) -> None:
        wait_for(lambda: max(self.steps(), default=-1) >= step, bound_s)

    def events(self, kind: str) -> list[Any]:
        events: list[RunEvent] = read_events(self.run_dir)
        return [event for event in events if event.kind == kind]

    def check(self, undisturbed: dict[int, float]) -> list[dict[str, Any]]:
        """Every step was committed, and every loss is the undisturbed one."""
        log = json_log(self.log)
        assert sorted({line["step"] for line in log}) == list(range(len(undisturbed))), self.said()
        for line in log:
            assert line["loss"] == pytest.approx(undisturbed[line["step"]], rel=1e-5), line
        return log

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def ended(process: subprocess.Popen[bytes], bound_s: float = BOUND_S) -> int:
    return process.wait(bound_s)
