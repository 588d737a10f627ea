"""A local fleet: real processes, real signals, workers without torch."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.scenarios.launch import BOUND_S, processes_with
from tests.unit.fleet.support import make_plan
from tests.waiting import wait_for
from varuna.core.errors import FleetError, UsageError
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.service.local_workers import LocalLaunch, LocalWorkers
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import SpawnRequested
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import Morphed, RunEvent, StepRecorded, WorkerJoined, WorkerLost

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "unit" / "fleet" / "fake_worker.py"

E = TypeVar("E", bound=RunEvent)

pytestmark = pytest.mark.timeout(200)


class Theatre:
    """A run in the background, with everything that it said."""

    def __init__(self, folder: Path, *, steps: int, fault: str = "none", **config: Any) -> None:
        self.events: list[RunEvent] = []
        self.lines: list[bytes] = []
        self.hooks: list[Callable[[RunEvent], None]] = []
        self.ended: Ended | None = None
        self.json_log = folder / "steps.jsonl"
        self.folder = folder
        self.run = ManagerService(
            ServiceConfig(run_dir=folder / "run", json_log=self.json_log),
            LocalLaunch(SCRIPT, [str(folder / "counter"), str(steps), fault], {"PYTHONPATH": str(ROOT)}),
            config=FleetConfig(**{"lease_s": 60.0, **config}),  # a busy machine is none that froze
            planner=partial(make_plan, stages=1),
            on_event=self.observe,
            write=self.lines.append,
        )
        self.thread = threading.Thread(target=self.go)

    def go(self) -> None:
        self.ended = self.run.manage()

    def kill(self, rank: int) -> None:
        self.run.workers.kill(self.run.manager.fleet.members[rank])

    def observe(self, event: RunEvent) -> None:
        self.events.append(event)
        for hook in self.hooks:
            hook(event)

    def finish(self) -> Ended:
        self.thread.start()
        self.thread.join(BOUND_S)
        if self.thread.is_alive():
            self.run.stop("the test took too long", 99)
            self.thread.join()
        assert self.ended is not None
        for event in self.of(WorkerJoined):
            assert not is_alive(event.pid)
        return self.ended

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def once_at(step: int, act: Callable[[], None]) -> Callable[[RunEvent], None]:
    """A hook that acts when ``step`` is recorded for the first time."""
    done = False

    def hook(event: RunEvent) -> None:
        nonlocal done
        if isinstance(event, StepRecorded) and event.step == step and not done:
            done = True
            act()

    return hook


def test_a_killed_worker_is_replaced_and_no_step_is_missed(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, steps=60, fault="until-2", workers=3, join_grace_s=0.1)
    theatre.hooks.append(once_at(10, lambda: theatre.kill(2)))
    assert theatre.finish() == Ended(0, "60 steps done")
    causes = [event.record.cause for event in theatre.of(Morphed)]
    assert causes == ["worker w2 killed by SIGKILL", "worker w3 joined"]
    lines = [json.loads(line) for line in theatre.json_log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(60))
    assert lines[-1]["plan"] == {"stages": 1, "replicas": 3, "shape": "1x3", "micro_batch": 2, "micro_batches": 8}
    assert theatre.lines[0] == b"hello of w0\n"
    assert [line for line in theatre.lines if line.startswith(b"step")] == [b"step %d\n" % n for n in range(60)]
    kinds = [event.kind for event in read_events(tmp_path / "run")]
    assert kinds.count("generation_started") == 3


def test_losing_rank_0_only_changes_who_is_heard(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, steps=60, fault="until-1", workers=2, replace=False)
    theatre.hooks.append(once_at(10, lambda: theatre.kill(0)))
    assert theatre.finish().exit_code == 0
    assert theatre.of(WorkerLost)[0].cause == "worker w0 killed by SIGKILL"
    assert (tmp_path / "run" / "w1.log").read_bytes().startswith(b"hello of w1\n")


def test_a_frozen_worker_is_evicted_and_killed(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, steps=60, fault="until-1", workers=3, lease_s=5.0, replace=False)

    def freeze() -> None:
        pid = theatre.run.workers.pid(theatre.run.manager.fleet.members[2])
        assert pid is not None
        os.killpg(pid, signal.SIGSTOP)

    theatre.hooks.append(once_at(10, freeze))
    assert theatre.finish().exit_code == 0
    [lost] = theatre.of(WorkerLost)
    assert re.match(r"worker w2 froze \(no heartbeat for ([5-9]|\d\d+)\.", lost.cause)  # its lease, or a busy machine


def test_a_worker_can_be_added_by_hand(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, steps=60, fault="until-1", workers=1, replace=False, join_grace_s=0.1)
    theatre.hooks.append(once_at(5, lambda: theatre.run.mailbox.post(SpawnRequested(1))))
    assert theatre.finish().exit_code == 0
    assert [event.record.cause for event in theatre.of(Morphed)] == ["worker w1 joined"]


@pytest.mark.parametrize(("fault", "message"), [("raise", "the fake fault"), ("early", "the early fault")])
def test_a_script_that_raises_ends_the_run_with_one_traceback(tmp_path: Path, fault: str, message: str) -> None:
    ended = Theatre(tmp_path, steps=10_000, workers=3, fault=fault).finish()
    assert ended.exit_code == 1
    assert ended.text.count("Traceback") == 1
    assert ended.text.rstrip().endswith(message)
    assert "worker w1" in ended.text.splitlines()[0]


def manages(folder: Path) -> subprocess.Popen[str]:
    """A parent that trains for ever with two workers, whose process ids it prints."""
    program = f"""
from pathlib import Path
from tests.unit.fleet.support import make_plan
from varuna.fleet.service.local_workers import LocalLaunch
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
ended = ManagerService(ServiceConfig(run_dir=Path({str(folder)!r})),
    LocalLaunch(Path({str(SCRIPT)!r}), [{str(folder / "counter")!r}, "100000", "none"]),
    config=FleetConfig(workers=2), planner=make_plan, write=lambda line: None,
    on_event=lambda event: print(getattr(event, "pid", "other"), flush=True)).manage()
raise SystemExit(ended.exit_code)
"""
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    with manages(tmp_path) as parent:
        assert parent.stdout is not None
        lines = pid_lines(parent.stdout)
        pids = [int(next(lines)) for _ in range(2)]
        wait_for(lambda: set(pids) <= set(processes_with(f"{SCRIPT} {tmp_path / 'counter'}")))  # as ps shows them
        parent.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


def pid_lines(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.strip().isdigit())


def test_sigterm_ends_everything(tmp_path: Path) -> None:
    with manages(tmp_path) as parent:
        assert parent.stdout is not None
        lines = pid_lines(parent.stdout)
        pids = [int(next(lines)) for _ in range(2)]
        parent.terminate()
        assert parent.wait(BOUND_S) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))


def test_a_port_in_use_is_named_with_a_way_out(tmp_path: Path) -> None:
    first = Theatre(tmp_path, steps=1, workers=1)
    port = first.run.port
    try:
        with pytest.raises(FleetError, match=rf"port {port} on 127.0.0.1 cannot be used .* --port"):
            service(LocalLaunch(SCRIPT), tmp_path / "other", port)
    finally:
        first.finish()


def test_a_missing_script_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no script at"):
        service(LocalLaunch(tmp_path / "no.py"), tmp_path)


def service(launch: LocalLaunch, folder: Path, port: int = 0) -> ManagerService[LocalWorkers]:
    place = ServiceConfig(run_dir=folder, port=port)
    return ManagerService(place, launch, config=FleetConfig(workers=1), planner=make_plan)
