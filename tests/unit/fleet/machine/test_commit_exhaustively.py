"""Every order of events around one step with two deaths, explored to the end; and faults that it must not miss.

The real state machine against workers that know what they truly hold (simulated_fleet). A state is expanded once;
what may happen next: a message is delivered or obeyed, a vote's result reaches one rank, a section is fetched, a worker
that stands still says so again (as it does when it reconnects), a worker dies.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from tests.unit.fleet.machine import faults
from tests.unit.fleet.machine.rollbacks import abandoned_timeline, spare_of_a_rollback
from tests.unit.fleet.simulated_fleet import SECTIONS, STEPS, SimulatedFleet, SimulatedWorker, one_stage
from tests.unit.fleet.support import Driver, Machine, make_job, make_plan, two_stages
from varuna.core.devices import WorkerGroups
from varuna.core.messages import Apply, Recorded, Suspect
from varuna.core.model import JobFacts, Memory
from varuna.core.plan import Copies, Plan
from varuna.fleet.machine.advance import advance
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.outputs import Instruction, Publish, Send
from varuna.fleet.state.phases import Ended, Stopping
from varuna.fleet.state.run_events import VerdictReached

STEPS_BEFORE = 4  # with checkpoints, the newest is that of step 3


class Small(SimulatedFleet):
    """A fleet that can be forked, in which no time passes and nobody comes to replace the dead."""

    def __init__(
        self,
        workers: int,
        plan: Callable[..., Plan],
        *,
        deaths: int,
        shared: bool = False,
        last: bool = False,
        machine: Machine = advance,
    ) -> None:
        self.deaths, self.binding = deaths, False
        self.repeats = 0 if shared or last else 1  # shared state has states enough
        job = make_job(sections=SECTIONS, steps=STEPS_BEFORE + 1 if last else STEPS)
        job = job.model_copy(update={"memory": Memory(shard_optimizer=shared)})
        config = FleetConfig(workers=workers, replace=False)
        super().__init__(Driver(config, plan=plan, job=job, machine=machine), checkpoints=True)
        for worker in list(self.workers.values()):
            self.hello(worker)
        for _ in range(8):
            for worker in self.workers.values():
                self.obey(worker)
                self.fetch(worker)
        for _ in range(STEPS_BEFORE):
            self.vote()
            for worker in self.workers.values():
                self.learn(worker)
                self.deliver(worker)
                self.obey(worker)
            for worker in self.workers.values():
                self.gather(worker)
        self.vote()  # the step in flight: nobody has heard the result yet

    def fork(self) -> "Small":
        """An independent copy; frozen values are shared."""
        twin = _copy(self)
        twin.driver = _copy(self.driver)
        twin.driver.done, twin.seen = [], 0
        twin.workers = {name: _twin(worker) for name, worker in self.workers.items()}
        twin.votes, twin.recorded, twin.generations = dict(self.votes), list(self.recorded), list(self.generations)
        return twin

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Publish(event=VerdictReached()):
                self.binding = True
            case Send(message=Apply()):
                assert self.binding, "a verdict is on disk before anybody is told"
        super().carry_out(instruction)

    def tidy(self) -> None:
        """Let workers obey at once where nobody's decision depends on it."""
        for worker in self.workers.values():
            while worker.inbox and isinstance(worker.inbox[0], Recorded):
                self.obey(worker)

    def suspect(self) -> None:
        """A link broke; the generation ends on that evidence at whatever moment it is delivered."""
        self.driver.fleet = replace(self.driver.fleet, config=replace(self.driver.fleet.config, suspect_grace_s=0.0))
        worker = list(self.workers.values())[-1]
        worker.outbox.append(Suspect(generation=worker.generation, reason="?"))

    def again(self, worker: SimulatedWorker) -> None:
        """It reconnects while it stands still, and says again what it holds."""
        if worker.alive and worker.stopped and worker.generation >= 0 and self.repeats:
            self.repeats -= 1
            worker.report()

    def die(self, worker: SimulatedWorker) -> None:
        if worker.alive and self.deaths:
            self.deaths -= 1
            super().die(worker)

    def successors(self) -> Iterator["Small"]:
        """All states that one event leads to."""
        if isinstance(self.driver.fleet.phase, Ended):
            return
        living = [(name, worker) for name, worker in self.workers.items() if worker.alive]
        choices = [(act, name) for act in self.acts() for name, worker in living if not _changes_nothing(act, worker)]
        # What the dead have sent may still arrive: die clears the outbox, so that is chosen before it.
        choices += [("deliver", name) for name, worker in self.workers.items() if worker.outbox]
        for act, name in choices:
            twin = self.fork()
            getattr(twin, act)(twin.workers[name])
            twin.tidy()
            yield twin

    def acts(self) -> list[str]:
        """List the acts that a living worker may do."""
        acts = ["obey", "learn", "fetch"] + ["leave"] * (self.steps < STEPS)
        acts += ["copy"] if self.driver.plan is copied_stages else []
        return acts + ["gather"] * self.shared + ["again"] * bool(self.repeats) + ["die"] * bool(self.deaths)

    def key(self) -> object:
        """Equal for states with the same future."""
        fleet = self.driver.fleet
        record = fleet.record
        return (
            repr(fleet.phase),
            tuple(fleet.workers.values()),
            (record.generation, record.members, record.first_step, record.rollback, record.recovery_seconds is None),
            (
                fleet.recorded.step,
                fleet.recorded.lineage,
                tuple(sorted((step, v.generation) for step, v in fleet.recorded.votes.items())),
            ),
            tuple(_face(worker) for worker in self.workers.values()),
            tuple((number, vote.step) for number, (vote, _) in sorted(self.votes.items())),
            (self.deaths, self.repeats, self.timeline, self.base, tuple(self.recorded)),
        )


T = TypeVar("T")


def _copy(original: T) -> T:
    """As ``copy.copy`` makes it, in a fraction of the time."""
    twin: T = object.__new__(type(original))
    vars(twin).update(vars(original))
    return twin


def _twin(worker: SimulatedWorker) -> SimulatedWorker:
    twin = _copy(worker)
    twin.sections, twin.lent, twin.votes = set(worker.sections), set(worker.lent), list(worker.votes)
    twin.copies = set(worker.copies)
    twin.inbox, twin.outbox = list(worker.inbox), list(worker.outbox)
    return twin


def _changes_nothing(act: str, worker: SimulatedWorker) -> bool:
    """Whether that can be seen beforehand."""
    if act == "obey":
        return not worker.inbox
    if act == "learn":
        return worker.stopped or worker.reduced is None or worker.reduced != worker.next_step
    if act == "copy":
        return worker.stopped or worker.copied_step == worker.next_step
    if act in ("fetch", "gather"):
        return worker.stopped or (not worker.loading and worker.stage <= worker.sections)
    return False


def _face(w: SimulatedWorker) -> object:
    messages = tuple((type(m).__name__, getattr(m, "generation", None)) for m in w.inbox)
    answers = tuple((type(m).__name__, getattr(m, "next_step", None), len(getattr(m, "votes", ()))) for m in w.outbox)
    votes = tuple((vote.step, vote.generation) for vote in w.votes)
    facts = (w.alive, w.generation, w.next_step, w.timeline, w.reduced, w.recorded_step, w.stopped, w.loading, w.left)
    held = tuple(sorted(w.sections)), tuple(sorted(w.lent)), tuple(sorted(w.copies)), w.copied_step
    return (*facts, w.over), held, messages, answers, votes


def explore(start: Small, most: int) -> int:
    """Expand every state once, depth first; assertions of the world fail on the way. Returns how many there were."""
    stack = [(start.key(), start)]
    seen = {stack[0][0]}
    while stack:
        here, world = stack.pop()
        leaf = True
        for successor in world.successors():
            key = successor.key()
            leaf = leaf and key == here
            if key not in seen:
                seen.add(key)
                stack.append((key, successor))
        if leaf:
            phase = world.driver.fleet.phase
            assert not isinstance(phase, Stopping) or any(w.outbox or w.inbox for w in world.workers.values()), (
                "everybody has answered, and yet there is no verdict"
            )
        if len(seen) >= most:
            break
    return len(seen)


def copied_stages(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """One replica, whose stages each have a copy on another worker."""
    return make_plan(job, workers, micro_batch).model_copy(update={"copies": Copies.STATE})


CASES = {
    "three replicas": (3, one_stage, 2, False),
    "two stages and a spare": (3, two_stages, 2, False),
    "three replicas that share state out": (3, one_stage, 2, True),
    "three stages with copies": (3, copied_stages, 1, False),  # with two deaths 112,628 states, explored once
}
LAST = {"two stages": (2, two_stages, 1, False), "two replicas": (2, one_stage, 1, False)}
"""The step in flight is the last one: who has it leaves."""


def explore_case(case: str, machine: Machine) -> int:
    workers, plan, deaths, shared = CASES[case]
    small = Small(workers, plan, deaths=deaths, shared=shared, machine=machine)
    return explore(small, most=50_000)


def some(names: Iterable[str], *, nightly: Container[str]) -> list[object]:
    """Leave the long ones to the night; the others find the same kinds of faults."""
    return [pytest.param(name, marks=pytest.mark.nightly) if name in nightly else name for name in names]


@pytest.mark.parametrize("case", some(CASES, nightly=list(CASES)[2:]))
def test_whatever_the_order_of_events_and_deaths_the_verdict_is_right(case: str) -> None:
    assert 500 < explore_case(case, advance) < 50_000  # all of them, and not none


def explore_last(case: str, machine: Machine) -> int:
    workers, plan, deaths, shared = LAST[case]
    small = Small(workers, plan, deaths=deaths, shared=shared, last=True, machine=machine)
    small.suspect()
    return explore(small, most=60_000)


@pytest.mark.parametrize("case", some(LAST, nightly=["two replicas"]))
def test_whoever_lives_has_the_last_step_when_it_is_sent_home(case: str) -> None:
    assert 500 < explore_last(case, advance) < 60_000


REPLICAS = partial(explore_case, "three replicas")
FAULTS: dict[str, tuple[Machine, Callable[[Machine], object]]] = {
    "an answer that crossed an Apply is taken for its result": (faults.takes_any_answer_for_the_result, REPLICAS),
    "the manager forgets the newest vote once it is recorded": (faults.forgets_recorded_votes, REPLICAS),
    "the verdict is told before it is written down": (faults.tells_before_it_writes, REPLICAS),
    "a step is run again although somebody committed it": (faults.is_heard_without_votes, REPLICAS),
    "votes of an abandoned timeline count": (faults.counts_every_vote, abandoned_timeline),
    "a rollback does not begin a timeline": (faults.begins_no_timeline, abandoned_timeline),
    "parameters without optimizer state count as a section": (
        faults.counts_lent_sections,
        partial(explore_case, "three replicas that share state out"),
    ),
    "nobody knows of copies": (faults.forgets_copies, partial(explore_case, "three stages with copies")),
    "copies that are not there count": (faults.counts_every_copy, partial(explore_case, "three stages with copies")),
    "the last step is over for those who have not applied it": (
        faults.ends_for_all,
        partial(explore_last, "two stages"),
    ),
    "a spare keeps its state through a rollback": (faults.forgets_that_it_rolled_back, spare_of_a_rollback),
}


LONG = (
    "the manager forgets the newest vote once it is recorded",
    "nobody knows of copies",
)
"""Faults that are found only after thousands of states."""


@pytest.mark.parametrize("fault", some(FAULTS, nightly=LONG))
def test_a_fault_in_the_rule_is_found(fault: str) -> None:
    machine, check = FAULTS[fault]
    with pytest.raises((AssertionError, KeyError)):
        check(machine)
