"""Any number of workers die at any point, whatever else happens then; what workers truly hold judges the manager."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.depth import by_depth
from tests.unit.fleet.simulated_fleet import PLANNERS, SECTIONS, STEPS, SimulatedFleet, SimulatedWorker, stormy
from tests.unit.fleet.support import Driver, make_job
from varuna.core.devices import WorkerGroups
from varuna.core.messages import StopReport
from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.core.sums import HeldSums, MicroBatchLoss, SectionSum, numbers_of, spans_of
from varuna.fleet.manager.validation import objection_to_sums
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.phases import Ended

MICRO_BATCH = 2

Act = Callable[[SimulatedWorker], None]


def usual(fleet: SimulatedFleet, deaths: float, *, votes: float, learns: float = 20) -> dict[Act, float]:
    """Weights of the acts that every storm has; ``deaths``: of dying."""
    return {
        fleet.deliver: 20,
        fleet.obey: 20,
        fleet.learn: learns,
        fleet.fetch: 10,
        fleet.vote_and_tick: votes,
        fleet.hello: 3,
        fleet.die: deaths,
        fleet.freeze: deaths / 5,
    }


def storm(fleet: SimulatedFleet, choose: random.Random, weights: dict[Act, float], acts: int) -> None:
    """Let things happen in any order; the run never ends by itself, and left alone it gets on."""
    for _ in range(acts):
        [act] = choose.choices(list(weights), weights=list(weights.values()))
        act(fleet.someone(choose.randrange(20)))
        assert not isinstance(fleet.driver.fleet.phase, Ended), fleet.driver.end
        if choose.random() < 0.015:
            fleet.round()
    fleet.check_liveness()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(by_depth(10, 100)))
def test_whoever_dies_no_committed_step_is_lost_and_the_run_gets_on(seed: int, shared: bool) -> None:
    choose = random.Random(seed)
    planners = ["one stage", "two stages"] if shared else ["deep", "two stages", "unlike", "by class"]
    planner, checkpoints = planners[seed % len(planners)], choose.random() < 0.5
    fleet = SimulatedFleet(stormy(choose.randint(2, 6), planner, shared=shared), checkpoints=checkpoints)
    if choose.random() < 0.3:  # plans and checkpoints are found while other things happen
        late = random.Random(seed)
        fleet.driver.answers = lambda: late.random() < 0.3
    for _ in range(choose.randint(1, 6)):
        fleet.round()
    deaths = choose.choice([0.3, 1, 3])
    weights: dict[Act, float] = {
        fleet.deliver: 20,
        fleet.obey: 20,
        fleet.learn: 20,
        fleet.fetch: 10,
        fleet.gather: 10,
        fleet.vote_and_tick: 8,
        fleet.hello: 3,
        fleet.die: deaths,
        fleet.freeze: deaths / 5,
        fleet.notice: deaths / 2,
        fleet.drain: deaths / 4,
        fleet.place: 1,
        fleet.ask: 0.2,
    }
    storm(fleet, choose, weights, 300)


class FleetOfAgents(SimulatedFleet):
    """Two machines, whose agents start another worker when one is gone."""

    def __init__(self, workers: int, planner: str, *, checkpoints: bool, steps: int = STEPS) -> None:
        config = FleetConfig(workers=workers, elastic=True, replace=False, wait_s=float("inf"))
        job = make_job(sections=SECTIONS, steps=steps)
        super().__init__(Driver(config, plan=PLANNERS[planner], job=job), checkpoints=checkpoints)
        self.tick()

    def tick(self) -> None:
        super().tick()
        for _ in range(self.driver.config.workers - sum(worker.alive for worker in self.workers.values())):
            self.start(f"n{len(self.workers) % 2}")


@pytest.mark.parametrize("seed", range(by_depth(12, 200)))
def test_a_manager_that_dies_at_any_moment_comes_back_to_the_same_run(seed: int) -> None:
    """The next manager has the journal and what agents remember: numbers of generations go on, as steps do."""
    choose = random.Random(seed)
    planner = ["one stage", "two stages", "unlike"][seed % 3]
    fleet = FleetOfAgents(choose.randint(2, 6), planner, checkpoints=choose.random() < 0.5)
    for _ in range(choose.randint(0, 4)):
        fleet.round()
    weights: dict[Act, float] = {
        fleet.deliver: 20,
        fleet.obey: 20,
        fleet.learn: 20,
        fleet.fetch: 10,
        fleet.vote_and_tick: 8,
        fleet.hello: 3,
        fleet.die: 0.5,
        fleet.restart_manager: choose.choice([0.5, 3]),
    }
    storm(fleet, choose, weights, 300)


@dataclass
class Summed:
    """A worker's true sums of one step: its own by section, and those of the rank that it keeps copies of."""

    generation: int
    step: int
    own: dict[int, set[int]]
    copies: dict[int, set[int]] = field(default_factory=dict)
    losses: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    """micro-batches of its pipeline that it has run in this generation"""


class SummingFleet(SimulatedFleet):
    """A fleet whose workers add micro-batches, send copies of sums, and continue from what they are told to."""

    def __init__(self, driver: Driver) -> None:
        self.summed: dict[str, Summed] = {}
        self.kept = self.copied = 0
        super().__init__(driver, checkpoints=True)

        plan = driver.plan

        def with_copies(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
            made = plan(job, workers, micro_batch)
            return made.model_copy(update={"copies": Copies.SUMS if made.replicas > 1 else Copies.NONE})

        driver.plan = with_copies

    def settle(self) -> bool:
        """Form the newest generation's sums, once all its members are there; whether they are."""
        fleet = self.driver.fleet
        if not fleet.history:
            return False
        record = fleet.record
        grid = [self.workers[name] for name in record.grid]
        if all(self._is_settled(worker, record.generation) for worker in grid):
            return True
        members = [self.workers[name] for name in record.members]
        if not all(w.alive and w.generation == record.generation and not w.stopped for w in members):
            return False
        if not all(worker.is_ready for worker in grid):
            return False
        self.summed = {w.name: self._begun(w, [each.name for each in members]) for w in grid}
        return True

    def _is_settled(self, worker: SimulatedWorker, generation: int) -> bool:
        return worker.name in self.summed and self.summed[worker.name].generation == generation

    def _begun(self, worker: SimulatedWorker, members: list[str]) -> Summed:
        """Return the sums with which a rank begins a generation."""
        assert worker.assignment is not None
        rest, step = worker.assignment.rest, worker.assignment.next_step
        begun = Summed(worker.generation, step, {section: set() for section in worker.stage})
        for each in rest.taken if rest is not None else ():
            source = self.summed[members[each.source_rank]]
            part = (source.copies if each.copied else source.own)[each.section]
            assert source.step == step
            assert part == set(numbers_of(each.micro_batches)), "it is what the manager was told"
            assert not begun.own[each.section] & part, "nothing is added twice"
            begun.own[each.section] |= part
            self.copied += each.copied
            self.kept += 1
        begun.losses = {each.micro_batch for each in rest.losses} if rest is not None else set()
        return begun

    def now(self, worker: SimulatedWorker) -> Summed | None:
        """Return the sums that a rank has of the step that it runs."""
        if not (self.settle() and worker.alive and worker.is_ready) or worker.left or not worker.stage:
            return None
        if not self._is_settled(worker, self.driver.fleet.generation) or worker.next_step is None:
            return None
        if self.summed[worker.name].step != worker.next_step:
            own: dict[int, set[int]] = {section: set() for section in worker.stage}
            self.summed[worker.name] = Summed(worker.generation, worker.next_step, own)
        return self.summed[worker.name]

    def add(self, worker: SimulatedWorker) -> None:
        """A rank runs the next micro-batch of its pipeline."""
        found, assignment = self.now(worker), worker.assignment
        if found is None or assignment is None or worker.reduced == worker.next_step:
            return
        rest = assignment.rest if found.step == assignment.next_step else None
        share = assignment.plan.micro_batches_of(worker.replica) if rest is None else numbers_of(rest.work)
        left = [number for number in share if number not in found.done]
        if not left:
            return
        found.done.add(left[0])
        kept = {each.section: numbers_of(each.micro_batches) for each in rest.kept} if rest is not None else {}
        for section, numbers in found.own.items():
            if left[0] not in kept.get(section, ()):
                assert left[0] not in numbers
                numbers.add(left[0])
        if SECTIONS - 1 in found.own:
            found.losses.add(left[0])

    def send(self, worker: SimulatedWorker) -> None:
        """A keeper gets the sums of its owner."""
        found, assignment = self.now(worker), worker.assignment
        if found is None or assignment is None or assignment.copy_from is None:
            return
        name = self.members(assignment)[assignment.copy_from]
        assert name != worker.name
        theirs = self.now(self.workers[name])
        if theirs is not None and theirs.step == found.step:
            found.copies = {section: set(numbers) for section, numbers in theirs.own.items() if numbers}
            found.losses |= theirs.losses

    def vote(self) -> None:
        """All finish the step: each micro-batch is in the sums of one replica."""
        if not self.settle():
            return
        fleet = self.driver.fleet
        before = self.votes.get(fleet.generation)
        super().vote()
        if self.votes.get(fleet.generation) == before:
            return
        plan = fleet.record.plan
        grid = [self.workers[name] for name in fleet.record.grid]
        for worker in grid:
            worker.reduced = None
            for _ in range(plan.micro_batches):
                self.add(worker)
            worker.reduced = worker.next_step
        everything = set(range(plan.micro_batches))
        for section in range(SECTIONS):
            added = [j for rank in plan.homes_of(section) for j in self.summed[grid[rank].name].own[section]]
            assert sorted(added) == sorted(everything)
        for worker in grid:
            found = self.summed[worker.name]
            found.own = {section: set(everything) for section in found.own}
            found.losses = set(everything)

    def fetch(self, worker: SimulatedWorker) -> None:
        """Fetch as always; state that was loaded has no sums."""
        was_loading = worker.loading
        super().fetch(worker)
        if was_loading and not worker.loading:
            self.summed.pop(worker.name, None)

    def deliver(self, worker: SimulatedWorker) -> None:
        """A worker that has stopped tells what it has; the manager believes it."""
        if worker.outbox and isinstance(worker.outbox[0], StopReport):
            held = worker.outbox[0] = self._with_sums(worker, worker.outbox[0])
            if held.sums is not None and held.next_step is not None and self.driver.fleet.is_joined(worker.name):
                assert objection_to_sums(self.driver.fleet, worker.name, held.next_step, held.sums) is None
        super().deliver(worker)

    def _with_sums(self, worker: SimulatedWorker, held: StopReport) -> StopReport:
        found = self.summed.get(worker.name)
        if found is None or held.next_step != found.step or worker.next_step != found.step:
            return held

        def told(sums: dict[int, set[int]]) -> tuple[SectionSum, ...]:
            return tuple(SectionSum(section=s, micro_batches=spans_of(j)) for s, j in sorted(sums.items()) if j)

        losses = tuple(MicroBatchLoss(micro_batch=number, values=(1.0, 2.0)) for number in sorted(found.losses))
        sums = HeldSums(micro_batch=MICRO_BATCH, sections=told(found.own), copies=told(found.copies), losses=losses)
        return held.model_copy(update={"sums": sums})


def test_whoever_dies_each_micro_batch_counts_once() -> None:
    """Vote by vote; whatever was told is what a generation begins with. Many continue from sums, some from copies."""
    kept = copied = 0
    seeds = by_depth(12, 90)
    for seed in range(seeds):
        choose = random.Random(seed)
        fleet = SummingFleet(stormy(choose.randint(3, 6), ["one stage", "two stages", "unlike"][seed % 3]))
        for _ in range(3):
            fleet.round()
        deaths = choose.choice([0.3, 1])
        weights = usual(fleet, deaths, votes=2) | {fleet.add: 60, fleet.send: 40}
        storm(fleet, choose, weights, 500)
        kept, copied = kept + fleet.kept, copied + fleet.copied
    assert kept > 2 * seeds
    assert copied > seeds / 9
