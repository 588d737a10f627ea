"""A worker without torch: rank 0 counts steps in a file, and everybody else reads it.

Arguments: the file, the number of steps, and optionally what goes wrong with worker w1.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from tests.unit.fleet.support import make_job, make_vote
from varuna.core.messages import Apply, Assign, Assignment, Beat, Finish, StopReport, TrainingOver
from varuna.membership.managed import ManagedMembership, from_environment


class FakeWorker:
    def __init__(self, member: ManagedMembership, counter: Path, steps: int, fault: str) -> None:
        self.member, self.counter, self.steps, self.fault = member, counter, steps, fault
        self.lock = threading.Lock()
        self.assignment: Assignment | None = None
        self.stopped = True
        self.pause = -1

    @property
    def next_step(self) -> int:
        return int(self.counter.read_text()) if self.counter.exists() else 0

    def beat(self) -> Beat:
        generation = -1 if self.assignment is None else self.assignment.generation
        return Beat(generation=generation, step=0, activity="fakes")

    def on_hold(self, generation: int) -> None:
        with self.lock:
            if self.assignment is not None and generation == self.assignment.generation and not self.stopped:
                self.stop(self.next_step)

    def on_flag(self, generation: int, flag: str) -> None:
        if flag == "regroup":
            self.pause = generation

    def stop(self, next_step: int) -> None:
        assert self.assignment is not None
        self.stopped = True
        plan, generation, rank = self.assignment.plan, self.assignment.generation, self.assignment.rank
        votes = (make_vote(plan, generation, next_step - 1),) if next_step > self.assignment.next_step else ()
        sections = () if self.assignment.is_spare else tuple(plan.first.sections_of(plan.place_of(rank).stage))
        self.member.held(
            StopReport(
                generation=generation,
                next_step=None if self.assignment.is_spare else next_step,
                sections=sections,
                votes=votes,
            )
        )

    def run(self) -> None:
        self.member.join(
            make_job(steps=self.steps),
            beat=self.beat,
            on_hold=self.on_hold,
            on_flag=self.on_flag,
        )
        while True:
            directive = self.member.next_directive()
            if isinstance(directive, Assign):
                with self.lock:
                    self.assignment, self.stopped = directive.assignment, False
                if self.train(directive.assignment):
                    self.member.leaving(self.steps)
                    return
            elif isinstance(directive, Apply):
                self.stop(directive.vote.step + 1)
            elif isinstance(directive, Finish | TrainingOver):
                return

    def train(self, assignment: Assignment) -> bool:
        """True if the run is complete."""
        if assignment.rank == 0 and (assignment.fresh or assignment.checkpoint):
            self.count(assignment.next_step)
        while not self.stopped:
            if self.next_step >= self.steps:
                return True
            if self.fault == "raise" and self.member.worker == "w1" and self.next_step >= 5:
                raise ValueError("the fake fault")
            time.sleep(0.02)
            with self.lock:
                if not self.stopped and assignment.rank == 0 and not self.waits(assignment):
                    self.commit(assignment)
        return False

    def waits(self, assignment: Assignment) -> bool:
        """``until-2``: step 50 is for generation 2, so that a test need not guess how long processes take to start."""
        if not self.fault.startswith("until-") or self.next_step < 50 or self.pause == assignment.generation:
            return False
        return assignment.generation < int(self.fault.removeprefix("until-"))

    def count(self, steps: int) -> None:
        """Whole at any moment: the other workers read it."""
        fresh = self.counter.with_suffix(".new")
        fresh.write_text(str(steps))
        fresh.rename(self.counter)

    def commit(self, assignment: Assignment) -> None:
        step = self.next_step
        self.count(step + 1)
        self.member.voted(make_vote(assignment.plan, assignment.generation, step))
        print(f"step {step}", flush=True)
        if self.pause == assignment.generation:
            self.stop(step + 1)


def main() -> None:
    counter, steps, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print(f"hello of {os.environ['VARUNA_WORKER']}", flush=True)
    if fault == "early" and os.environ["VARUNA_WORKER"] == "w1":
        raise RuntimeError("the early fault")
    member = from_environment()
    assert member is not None
    try:
        FakeWorker(member, counter, steps, fault).run()
    except ValueError as error:
        member.failed(f"ValueError: {error}", traceback.format_exc(), 1)
        raise


if __name__ == "__main__":
    main()
