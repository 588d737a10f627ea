"""How long training stands still: a killed worker, a frozen one, a planned loss, a gain; and torchrun beside it.

Four CPU workers over gloo train a small model (benchmarks/elastic_job.py) as 2 stages x 2 replicas. After each
disturbance the cluster is made whole again before the next one. All times are medians over the rounds.

- killed, frozen: from the signal to the end of the first backward of a micro-batch in the next generation.
- planned loss, gain: time between the last step before and the first step after the morph, less a median step.
- torchrun: the same model under DistributedDataParallel with 4 processes, --max-restarts, a checkpoint each 10 steps;
  from SIGKILL of one process to the next finished micro-batch, and to the next one that was not computed before.

    python benchmarks/recovery.py [--rounds 10] [--json]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.events import DrainRequested, SpawnRequested, StopRequested
from varuna.fleet.run import Run
from varuna.fleet.state import FleetConfig
from varuna.fleet.story import GenerationStarted, RunEvent, StepRecorded
from varuna.planner.choose import plan_run

JOB = Path(__file__).with_name("elastic_job.py")
WORKERS, SETTLED_STEPS, BOUND_S = 4, 8, 120.0


class Stage:
    """A run in the background, and what it said, with times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[tuple[float, StepRecorded]] = []
        self.generations: list[tuple[float, GenerationStarted]] = []

        def plan(job: JobFacts, workers: int, micro_batch: int | None) -> Plan:
            return plan_run(job, workers=workers, stages=2, micro_batch=micro_batch)

        self.run = Run(
            JOB,
            ["--marks", str(folder)],
            config=FleetConfig(workers=WORKERS, replace=False, join_grace_s=0.1),
            planner=plan,
            run_dir=folder / "run",
            on_event=self.note,
            write=lambda line: None,
            environment={"PYTHONPATH": str(JOB.parents[1])},
        )
        self.thread = threading.Thread(target=self.run.start_and_wait)

    def note(self, event: RunEvent) -> None:
        if isinstance(event, StepRecorded):
            self.steps.append((time.monotonic(), event))
        elif isinstance(event, GenerationStarted):
            self.generations.append((time.monotonic(), event))

    def settle(self, workers: int) -> None:
        """Wait until the newest generation has this many ranks and has trained for a while."""

        def settled() -> bool:
            fleet = self.run.manager.fleet
            if not fleet.history or len(fleet.record.grid) != workers or not self.steps:
                return False
            newest = fleet.record
            return sum(event.generation == newest.generation for _, event in self.steps[-20:]) >= SETTLED_STEPS

        wait_for(settled)

    def make_whole(self) -> None:
        missing = WORKERS - len(self.run.manager.fleet.joined)
        if missing:
            self.run.manager.post(SpawnRequested(missing))
        self.settle(WORKERS)

    def victim(self) -> tuple[str, int]:
        """The worker of the last rank."""
        name = self.run.worker_of(WORKERS - 1)
        pid = self.run.launcher.pid(name)
        assert pid is not None
        return name, pid

    def until_micro_batch(self, since_s: float) -> float:
        """Seconds from ``since_s`` to the first backward behind the next forming."""
        found: list[float] = []

        def seen() -> bool:
            for path in self.folder.glob("*.marks"):
                formed = False
                for what, at_s in marks_of(path):
                    formed = formed or (what == "form" and at_s > since_s)
                    if formed and what == "B" and at_s > since_s:
                        found.append(at_s)
                        break
            return bool(found)

        wait_for(seen)
        return min(found) - since_s

    def stall_around_generation(self, generation: int) -> float:
        """Gap between steps around the beginning of a generation, less a usual step."""
        wait_for(lambda: any(event.generation >= generation for _, event in self.steps))
        index = next(i for i, (_, event) in enumerate(self.steps) if event.generation >= generation)
        usual = [
            b[0] - a[0] for a, b in zip(self.steps[index - 7 : index - 1], self.steps[index - 6 : index], strict=True)
        ]
        return self.steps[index][0] - self.steps[index - 1][0] - statistics.median(usual)


def marks_of(path: Path) -> list[tuple[str, float]]:
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(row[0], float(row[2])) for row in rows if len(row) == 3]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing happened within {BOUND_S:.0f} s")
        time.sleep(0.02)


def elastic(rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"killed": [], "frozen": [], "planned loss": [], "gain": []}
    with tempfile.TemporaryDirectory() as name:
        stage = Stage(Path(name))
        stage.thread.start()
        try:
            stage.settle(WORKERS)
            for number in range(rounds):
                for kind in ("killed", "frozen", "planned loss"):
                    victim, pid = stage.victim()
                    generation = stage.run.manager.fleet.generation
                    since_s = time.monotonic()
                    if kind == "planned loss":
                        stage.run.manager.post(DrainRequested(victim))
                        found[kind].append(stage.stall_around_generation(generation + 1))
                    else:
                        os.killpg(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
                        found[kind].append(stage.until_micro_batch(since_s))
                    stage.settle(2)
                    generation = stage.run.manager.fleet.generation
                    stage.make_whole()
                    found["gain"].append(stage.stall_around_generation(generation + 1))
                    print(
                        f"round {number}: {kind} {found[kind][-1]:.2f} s, gain {found['gain'][-1]:.2f} s",
                        file=sys.stderr,
                    )
        finally:
            stage.run.manager.post(StopRequested("measured", 0))
            stage.thread.join()
    return found


def torchrun(rounds: int) -> dict[str, list[float]]:
    """Kill one of four processes, again and again; torchrun restarts all of them."""
    found: dict[str, list[float]] = {"any": [], "new": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), "--standalone"]
        command += ["--max-restarts", str(rounds + 5), "--monitor-interval", "0.1"]
        command += [str(JOB), "--marks", name, "--stock", str(folder / "state.pt")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as parent:
            try:
                for _ in range(rounds):
                    any_s, new_s = kill_one_of_torchrun(folder)
                    found["any"].append(any_s)
                    found["new"].append(new_s)
                    print(f"torchrun: {any_s:.2f} s, new work {new_s:.2f} s", file=sys.stderr)
            finally:
                os.killpg(parent.pid, signal.SIGKILL)
    return found


def kill_one_of_torchrun(folder: Path) -> tuple[float, float]:
    """Seconds from SIGKILL to the next micro-batch, and to the next one that was not computed before."""
    seen = {path: len(marks_of(path)) for path in folder.glob("*.marks")}

    def live() -> list[Path]:
        return [path for path in folder.glob("*.marks") if len(marks_of(path)) > seen.get(path, 0) + 30]

    wait_for(lambda: len(live()) >= WORKERS)
    old = set(folder.glob("*.marks"))
    step = max(int(path.read_text().splitlines()[-2].split()[1]) for path in live())
    since_s = time.monotonic()
    os.kill(int(live()[-1].stem.rsplit("-", 1)[1]), signal.SIGKILL)

    def fresh(after: int) -> list[float]:
        files = set(folder.glob("*.marks")) - old
        rows = [line.split() for path in files for line in path.read_text().splitlines()]
        return [float(row[2]) for row in rows if len(row) == 3 and int(row[1]) >= after]

    wait_for(lambda: bool(fresh(step)))
    return min(fresh(0)) - since_s, min(fresh(step)) - since_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ours, theirs = elastic(args.rounds), torchrun(args.rounds)
    medians = {kind: statistics.median(values) for kind, values in ours.items()}
    stock = {kind: statistics.median(values) for kind, values in theirs.items()}
    figures = {
        "killed_s": medians["killed"],
        "frozen_s": medians["frozen"],
        "lease_s": FleetConfig(workers=1).lease_s,
        "planned_loss_stall_s": medians["planned loss"],
        "gain_stall_s": medians["gain"],
        "torchrun_s": stock["any"],
        "torchrun_new_work_s": stock["new"],
        "torchrun_over_killed": stock["new"] / medians["killed"],
        "worst": {kind: max(values) for kind, values in {**ours, **theirs}.items()},
        "rounds": args.rounds,
    }
    if not args.json:
        print(f"killed to the next micro-batch   {figures['killed_s']:6.2f} s")
        print(f"frozen (lease {figures['lease_s']} s)            {figures['frozen_s']:6.2f} s")
        print(f"planned loss stalls              {figures['planned_loss_stall_s']:6.2f} s")
        print(f"gain stalls                      {figures['gain_stall_s']:6.2f} s")
        print(f"torchrun: next micro-batch       {figures['torchrun_s']:6.2f} s, next new one {stock['new']:.2f} s")
        print(f"torchrun / killed                {figures['torchrun_over_killed']:6.1f} x")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
