"""Measure stalls of training: a killed worker, a frozen one, a planned loss, a gain; and torchrun beside it.

Four CPU workers train a small model (benchmarks/elastic_job.py) as 2 stages x 2 replicas. After each
disturbance the cluster is made whole again before the next one. All times are medians over the rounds.

- killed, frozen: from the signal to the end of the first backward of a micro-batch in the next generation.
- planned loss, gain: time between the last step before and the first step after the morph, less a median step.
- torchrun: the same model under DistributedDataParallel with 4 processes, --max-restarts, a checkpoint each 10 steps;
  from SIGKILL of one process to the next finished micro-batch, and to the next one that was not computed before.

    python benchmarks/recovery.py [--rounds 10] [--only varuna|torchrun]

Each half takes at most five minutes: a round that does not fit any more is left out, and `rounds` says how many there
were. The last line is JSON.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from varuna.core.devices import WorkerGroups
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.service.local_workers import LocalLaunch
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import DrainRequested, SpawnRequested
from varuna.fleet.state.run_events import RunEvent, StepRecorded
from varuna.planner.choose import plan_run

JOB = Path(__file__).with_name("elastic_job.py")
WORKERS, SETTLED_STEPS, SETTLED_MARKS = 4, 8, 30
HALF_S, WAIT_S, STOP_S = 280.0, 90.0, 30.0
KINDS = ("killed", "frozen", "planned loss")


class Bound:
    """The time that one half may take, and each wait in it."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.rounds = 0

    @property
    def left_s(self) -> float:
        """Until the half has to be over."""
        return self.began_s + HALF_S - time.monotonic()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Poll.

        Raises:
            TimeoutError: it took too long.
        """
        bound_s = min(WAIT_S, self.left_s)
        deadline_s = time.monotonic() + bound_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {bound_s:.0f} s for {what}, in vain")
            time.sleep(0.01)

    def each(self, rounds: int) -> Iterator[int]:
        """Numbers of rounds, as long as another one as long as the longest so far fits."""
        longest_s = 0.0
        for number in range(rounds):
            if self.left_s < longest_s:
                print(f"no time for round {number}", file=sys.stderr)
                return
            begin_s = time.monotonic()
            yield number
            self.rounds += 1
            longest_s = max(longest_s, time.monotonic() - begin_s)


class Mark(NamedTuple):
    """A line of a worker's marks."""

    what: str
    step: int
    at_s: float


class Tail:
    """Reads what workers have added to their marks since the last look; reading all of it each time never ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}

    def look(self) -> dict[Path, list[Mark]]:
        """New marks of each worker; a line that is not complete waits for the next look."""
        found: dict[Path, list[Mark]] = {}
        for path in self._folder.glob("*.marks"):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + len(newline)
            rows = [line.split() for line in whole.decode().splitlines()]
            found[path] = [Mark(what, int(step), float(at_s)) for what, step, at_s in rows]
        return found


class Stage:
    """A run in the background, and what it said, with times."""

    def __init__(self, folder: Path, bound: Bound) -> None:
        self.bound, self.tail = bound, Tail(folder)
        self.steps: list[tuple[float, StepRecorded]] = []

        def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
            return plan_run(job, workers=workers, stages=2, micro_batch=micro_batch)

        self.run = ManagerService(
            ServiceConfig(run_dir=folder / "run"),
            LocalLaunch(JOB, ("--marks", str(folder)), {"PYTHONPATH": str(JOB.parents[1])}),
            config=FleetConfig(workers=WORKERS, replace=False, join_grace_s=0.1),
            planner=plan,
            on_event=self.note,
            write=lambda line: None,
        )
        self.thread = threading.Thread(target=self.run.manage, daemon=True)
        self.thread.start()

    def note(self, event: RunEvent) -> None:
        if isinstance(event, StepRecorded):
            self.steps.append((time.monotonic(), event))

    def settle(self, workers: int) -> None:
        """Wait until the newest generation has this many ranks and has trained for a while."""

        def settled() -> bool:
            fleet = self.run.manager.fleet
            if not fleet.history or len(fleet.record.grid) != workers or not self.steps:
                return False
            newest = fleet.record
            return sum(event.generation == newest.generation for _, event in self.steps[-20:]) >= SETTLED_STEPS

        self.bound.wait_for(settled, f"{SETTLED_STEPS} steps with {workers} ranks")

    def make_whole(self) -> None:
        missing = WORKERS - self.run.manager.fleet.starts.wanted  # a drained worker is replaced without being asked for
        if missing > 0:
            self.run.mailbox.post(SpawnRequested(missing))
        self.settle(WORKERS)

    def victim(self) -> tuple[str, int]:
        """The worker of the last rank."""
        name = self.run.manager.fleet.members[WORKERS - 1]
        pid = self.run.workers.pid(name)
        assert pid is not None
        return name, pid

    def disturb(self, kind: str) -> float:
        """Seconds that training stands still."""
        victim, pid = self.victim()
        if kind == "planned loss":
            generation = self.run.manager.fleet.generation
            self.run.mailbox.post(DrainRequested(victim))
            return self.stall_around_generation(generation + 1)
        self.tail.look()
        since_s = time.monotonic()
        os.killpg(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        return self.until_micro_batch(since_s)

    def until_micro_batch(self, since_s: float) -> float:
        """Seconds from ``since_s`` to the first backward after the next forming."""
        formed: set[Path] = set()
        found: list[float] = []

        def seen() -> bool:
            for path, marks in self.tail.look().items():
                for mark in marks:
                    if mark.what == "form" and mark.at_s > since_s:
                        formed.add(path)
                    elif mark.what == "B" and path in formed:
                        found.append(mark.at_s)
            return bool(found)

        self.bound.wait_for(seen, "the next micro-batch")
        return min(found) - since_s

    def stall_around_generation(self, generation: int) -> float:
        """Gap between steps around the beginning of a generation, less a usual step."""
        self.bound.wait_for(
            lambda: self.steps[-1][1].generation >= generation, f"the first step of generation {generation}"
        )
        index = next(i for i, (_, event) in enumerate(self.steps) if event.generation >= generation)
        usual = [
            b[0] - a[0] for a, b in zip(self.steps[index - 7 : index - 1], self.steps[index - 6 : index], strict=True)
        ]
        return self.steps[index][0] - self.steps[index - 1][0] - statistics.median(usual)

    def close(self) -> None:
        self.run.stop("measured", 0)
        self.thread.join(STOP_S)


def elastic(rounds: int) -> dict[str, list[float]]:
    """Seconds by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "gain")}
    bound = Bound()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, until_time_is_up():
        stage = Stage(Path(name), bound)
        try:
            stage.settle(WORKERS)
            for number in bound.each(rounds):
                for kind in KINDS:
                    found[kind].append(stage.disturb(kind))
                    stage.settle(2)
                    generation = stage.run.manager.fleet.generation
                    stage.make_whole()
                    found["gain"].append(stage.stall_around_generation(generation + 1))
                    print(
                        f"round {number}: {kind} {found[kind][-1]:.2f} s, gain {found['gain'][-1]:.2f} s",
                        file=sys.stderr,
                    )
        finally:
            stage.close()
    return found


@contextlib.contextmanager
def until_time_is_up() -> Iterator[None]:
    """End the block when its time is up; what was measured until then counts."""
    try:
        yield
    except TimeoutError as error:
        print(error, file=sys.stderr)


class Stock:
    """Four processes under torchrun, which has no part in what its workers write."""

    def __init__(self, folder: Path, rounds: int, bound: Bound) -> None:
        self.bound, self.tail = bound, Tail(folder)
        self.errors = folder / "stderr"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), "--standalone"]
        command += ["--max-restarts", str(rounds + 5), "--monitor-interval", "0.1"]
        command += [str(JOB), "--marks", str(folder), "--stock", str(folder / "state.pt")]
        with self.errors.open("wb") as errors:
            self.parent = subprocess.Popen(
                command,
                # With the store that it shares by default, new processes find, and try, the addresses of dead ones.
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self.workers: set[int] = set()

    def look(self) -> dict[Path, list[Mark]]:
        """New marks; torchrun's workers are in sessions of their own, and so remembered to be killed.

        Raises:
            RuntimeError: torchrun ended.
        """
        if self.parent.poll() is not None:
            tail = self.errors.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"torchrun ended with exit code {self.parent.returncode}:\n{tail}")
        found = self.tail.look()
        self.workers |= {pid_of(path) for path in found}
        return found

    def kill_one(self) -> tuple[float, float]:
        """Seconds from SIGKILL to the next micro-batch, and to the next one that was not computed before."""
        counts: dict[Path, int] = {}
        newest: dict[Path, int] = {}

        def settled() -> bool:
            for path, marks in self.look().items():
                counts[path] = counts.get(path, 0) + len(marks)
                if marks:
                    newest[path] = marks[-1].step
            return len(trained()) >= WORKERS

        def trained() -> list[Path]:
            return [path for path, count in counts.items() if count > SETTLED_MARKS and is_alive(pid_of(path))]

        self.bound.wait_for(settled, f"{SETTLED_MARKS} micro-batches of each process under torchrun")
        since_s = time.monotonic()
        os.kill(pid_of(trained()[-1]), signal.SIGKILL)
        step, old = max(newest.values()), set(counts)
        fresh: list[Mark] = []

        def goes_on() -> bool:
            fresh.extend(mark for path, marks in self.look().items() if path not in old for mark in marks)
            return any(mark.step > step for mark in fresh)

        self.bound.wait_for(goes_on, f"step {step + 1} under torchrun")
        any_s = min(mark.at_s for mark in fresh)
        new_s = min(mark.at_s for mark in fresh if mark.step > step)
        return any_s - since_s, new_s - since_s

    def close(self) -> None:
        """Leave no process behind."""
        with contextlib.suppress(RuntimeError):
            self.look()
        for pid in (self.parent.pid, *self.workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.parent.wait(STOP_S)


def pid_of(path: Path) -> int:
    return int(path.stem.rsplit("-", 1)[1])


def is_alive(pid: int) -> bool:
    """Whether it still runs this job: its number may have been given to another process."""
    try:
        return JOB.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def torchrun(rounds: int) -> dict[str, list[float]]:
    """Kill one of four processes, again and again; torchrun restarts all of them."""
    found: dict[str, list[float]] = {"any": [], "new": []}
    bound = Bound()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, until_time_is_up():
        stock = Stock(Path(name), rounds, bound)
        try:
            for _ in bound.each(rounds):
                any_s, new_s = stock.kill_one()
                found["any"].append(any_s)
                found["new"].append(new_s)
                print(f"torchrun: {any_s:.2f} s, new work {new_s:.2f} s", file=sys.stderr)
        finally:
            stock.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("varuna", "torchrun"))
    args = parser.parse_args()
    ours = elastic(args.rounds) if args.only != "torchrun" else {}
    theirs = torchrun(args.rounds) if args.only != "varuna" else {}
    measured = {kind: values for kind, values in {**ours, **theirs}.items() if values}
    medians = {kind: statistics.median(values) for kind, values in measured.items()}
    figures: dict[str, object] = {
        "killed_s": medians.get("killed"),
        "frozen_s": medians.get("frozen"),
        "lease_s": FleetConfig(workers=1).lease_s,
        "planned_loss_stall_s": medians.get("planned loss"),
        "gain_stall_s": medians.get("gain"),
        "torchrun_s": medians.get("any"),
        "torchrun_new_work_s": medians.get("new"),
        "torchrun_over_killed": medians["new"] / medians["killed"] if {"new", "killed"} <= medians.keys() else None,
        "worst": {kind: max(values) for kind, values in measured.items()},
        "rounds": {kind: len(values) for kind, values in measured.items()},
    }
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name:24} {value:7.2f}")
    print(json.dumps(figures))
    if len(measured) < len(ours) + len(theirs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
