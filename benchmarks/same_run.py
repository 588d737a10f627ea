"""One process, and a run with 40 disturbances, on the same samples: are the losses the same?

Workers of `examples/gpt2_text` are killed, frozen and started again while they train, and the plan changes with their
number. Then a plain PyTorch loop, which imports nothing of Varuna, trains the same model on the same samples, and
`varuna run` trains it under fixed plans. The picture shows both losses, the plans as bands, and what was done.

    python -m benchmarks.same_run --svg docs/same-run.svg --keep same-run.json
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.same_run_picture import ACTS, Act, Span, draw
from varuna.core.devices import WorkerGroups, equal_workers, size_of
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.extras.demo.run import dataset_size, example_folder, sample_order, train_reference
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.service.local_workers import LocalLaunch, LocalWorkers
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import SpawnRequested
from varuna.fleet.state.run_events import GenerationStarted, RunEvent, StepRecorded
from varuna.observe.report import RunHistory, largest_relative_difference
from varuna.planner.choose import plan_run

GLOBAL_BATCH, MICRO_BATCH, LENGTH = 16, 2, 128
MODEL = ("--layers", "6", "--dropout", "0", "--length", str(LENGTH), "--seed", "0")
STAGES = {1: 1, 2: 2, 3: 3, 4: 2, 5: 1}
"""P by the number of workers: 1x1, 2x1, 3x1, 2x2 and 1x5, so that the plans differ in both numbers."""
MOST, LEAST = 5, 2
LEASE_S = 3.0
FIXED = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
Planner = Callable[[JobFacts, WorkerGroups, int | None], Plan]


class Disturber:
    """Takes workers away and brings others, once in so many steps, until enough was done."""

    def __init__(self, steps: int, acts: int, seed: int) -> None:
        self._choose = random.Random(seed)
        every = (steps - 8) / acts
        self._due = [round(4 + number * every) for number in range(acts)]
        self._expected = MOST
        self.done: list[tuple[int, Act]] = []
        self.run: ManagerService[LocalWorkers] | None = None

    def __call__(self, event: RunEvent) -> None:
        """Take an event, on the thread of the run."""
        if self.run is None or not isinstance(event, StepRecorded) or not self._due or event.step < self._due[0]:
            return
        members = [name for name in self.run.manager.fleet.members if self.run.workers.pid(name) is not None]
        if len(members) <= LEAST and self._expected > LEAST + 1:
            return  # those that were called back are on their way
        self._due.pop(0)
        if self._expected < MOST and (len(members) <= LEAST or self._choose.random() < 0.45):
            self._expected += 1
            self.run.mailbox.post(SpawnRequested(1))
            self._note(event.step, "start")
            return
        victim = self._choose.choice(members)
        act: Act = self._choose.choice(("kill", "kill", "freeze"))
        self._expected -= 1
        pid = self.run.workers.pid(victim)
        assert pid is not None
        os.killpg(pid, signal.SIGKILL if act == "kill" else signal.SIGSTOP)
        self._note(event.step, act)

    def _note(self, step: int, act: Act) -> None:
        self.done.append((step, act))
        print(f"step {step}: {act}", file=sys.stderr)


def planned(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """The plan of the disturbed run."""
    count = min(size_of(workers), MOST)
    return plan_run(job, workers=equal_workers(count), stages=STAGES[count], micro_batch=MICRO_BATCH)


def train(
    folder: Path, steps: int, *, workers: int, planner: Planner, disturber: Disturber | None = None
) -> tuple[RunHistory, list[Span]]:
    """Train with real processes; the history of losses, and the spans of steps that each plan ran."""
    history, spans = RunHistory(), list[Span]()

    def observe(event: RunEvent) -> None:
        history.add_event(event)
        if isinstance(event, GenerationStarted):
            plan = event.record.plan
            spans.append(Span(event.record.first_step, plan.stages, plan.replicas))
        if disturber is not None:
            disturber(event)

    folder.mkdir()
    saved = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "5")
    args = ("--steps", str(steps), "--global-batch", str(GLOBAL_BATCH), *saved, *MODEL)
    run = ManagerService(
        ServiceConfig(run_dir=folder / "run"),
        LocalLaunch(example_folder("gpt2_text") / "train.py", args, environment={"VARUNA_CALIBRATION": "none"}),
        config=FleetConfig(workers=workers, replace=False, lease_s=LEASE_S),
        planner=planner,
        on_event=observe,
        write=lambda line: None,
    )
    if disturber is not None:
        disturber.run = run
    ended = run.manage()
    assert ended is not None
    if ended.exit_code:
        raise SystemExit(f"the run ended with exit code {ended.exit_code}: {ended.text}")
    if faults := audit(read_events(folder / "run")).faults:
        raise SystemExit("the ledger of samples has faults: " + "; ".join(faults))
    return history, spans


def fixed(stages: int) -> Planner:
    """The planner of a run whose plan does not change."""
    return lambda job, workers, micro_batch: plan_run(job, workers=workers, stages=stages, micro_batch=MICRO_BATCH)


def plain(folder: Path, steps: int) -> list[float]:
    """Losses of a plain PyTorch loop."""
    example = example_folder("gpt2_text")
    folder.mkdir()
    order = sample_order(steps, global_batch=GLOBAL_BATCH, size=dataset_size(example, LENGTH), seed=0)
    flags = ("--chunk", str(MICRO_BATCH), *MODEL)
    return train_reference(example / "reference.py", order, flags, folder, lambda line: None)


def row(name: str, losses: Sequence[float], reference: Sequence[float], alone: Sequence[float]) -> str:
    """A line of the table."""
    difference = largest_relative_difference(list(losses), list(reference))
    same = sum(a == b for a, b in zip(losses, alone, strict=True))
    return f"| {name} | {losses[-1]:.7f} | {difference:.1e} | {same} of {len(alone)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--acts", type=int, default=40)
    parser.add_argument("--fixed-steps", type=int, default=60, help="steps of each run with a fixed plan; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--keep", type=Path, help="JSON of everything that was found")
    args = parser.parse_args()
    disturber = Disturber(args.steps, args.acts, args.seed)
    tables = {}
    with tempfile.TemporaryDirectory() as name:
        history, spans = train(Path(name) / "disturbed", args.steps, workers=MOST, planner=planned, disturber=disturber)
        losses, reference = history.curve(args.steps), plain(Path(name) / "plain", args.steps)
        if args.svg:
            args.svg.write_text(draw(losses, reference, spans, disturber.done))
        for stages, replicas in FIXED if args.fixed_steps else ():
            folder = Path(name) / f"{stages}x{replicas}"
            found, _ = train(folder, args.fixed_steps, workers=stages * replicas, planner=fixed(stages))
            tables[f"{stages}x{replicas}"] = found.curve(args.fixed_steps)
    difference = largest_relative_difference(losses, reference)
    done = {act: sum(each == act for _, each in disturber.done) for act in ACTS}
    report = {
        "steps": args.steps,
        "acts": done,
        "morphs": len(spans) - 1,
        "redone": sum(each.steps_redone for each in history.generations),
        "difference": difference,
        "losses": losses,
        "reference": reference,
        "spans": spans,
        "done": disturber.done,
        "fixed": tables,
    }
    if args.keep:
        args.keep.write_text(json.dumps(report) + "\n")
    print(json.dumps({key: value for key, value in report.items() if not isinstance(value, list | dict)}))
    print(done)
    if tables:
        count, alone = args.fixed_steps, tables["1x1"]
        print("| run | last loss | largest relative difference from plain PyTorch | losses with the bits of 1x1 |")
        print("|---|---|---|---|")
        for name, curve in {"plain PyTorch": reference[:count], **tables, "disturbed": losses[:count]}.items():
            print(row(name, curve, reference[:count], alone))


if __name__ == "__main__":
    main()
