"""With one holder for each section, a loss sends all back to the newest step that the workers left have in memory."""

import random
from dataclasses import dataclass, field, replace

import pytest

from tests.depth import by_depth
from tests.unit.fleet.machine.test_storms import storm, usual
from tests.unit.fleet.simulated_fleet import SECTIONS, SimulatedFleet, SimulatedWorker, stormy
from tests.unit.fleet.support import Driver, make_job, make_plan
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.messages import Assignment, HeldCheckpoint, StopReport
from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.fleet.machine.recall import in_memory
from varuna.fleet.manager.validation import objection
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import CheckpointCompleted, Event
from varuna.fleet.state.outputs import Instruction, Publish
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import GenerationStarted, Notice
from varuna.fleet.state.worker import WorkerInventory, changed


def keeping(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """Return a plan with as many stages as workers, and with memory checkpoints."""
    return kept_often(make_plan(job, workers, micro_batch))


def keeping_or_not(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """Two replicas of an even number of workers: then each section has two holders."""
    count = size_of(workers)
    return kept_often(make_plan(job, workers, micro_batch, stages=min(count, SECTIONS) if count % 2 else count // 2))


def kept_often(plan: Plan) -> Plan:
    if plan.replicas > 1:
        return plan
    return plan.model_copy(update={"copies": Copies.STATE if plan.workers > 1 else Copies.NONE})


@pytest.fixture
def driver() -> Driver:
    """A run of 4x1 over eight sections, in the middle of step 9; lost workers are not replaced."""
    driver = Driver(FleetConfig(workers=4, replace=False), plan=keeping, job=make_job(sections=8, steps=100))
    driver.begin(*range(9))
    return driver


def answer(driver: Driver, worker: str, *steps: int, next_step: int = 9) -> None:
    """A worker reports its seat's sections, and of these older steps also those of the one that it keeps copies of."""
    rank = driver.fleet.rank_of(worker)
    assert rank is not None
    owner = driver.fleet.record.copied_from(rank)
    assert owner is not None
    own = driver.seat_sections(worker)
    both = tuple(sorted((*own, *driver.seat_sections(driver.fleet.record.grid[owner]))))
    generation = driver.fleet.generation
    kept = tuple(HeldCheckpoint(generation=generation, step=step, sections=both) for step in steps)
    held = StopReport(generation=generation, next_step=next_step, sections=own, checkpoints=kept)
    assert objection(driver.fleet, worker, held) is None
    driver.say(worker, held)


def test_all_go_back_to_the_newest_step_that_is_whole(driver: Driver) -> None:
    driver.kill("w1")
    answer(driver, "w0", 4, 7)
    answer(driver, "w2", 4)
    answer(driver, "w3", 4, 7)
    record = driver.fleet.record
    assert (record.plan.shape, record.first_step, record.steps_redone) == ("3x1", 7, 3), "w3 keeps w1's"
    assert record.rollback
    assert record.from_memory
    assert all(driver.assignments[name].from_memory and not driver.assignments[name].fresh for name in record.grid)
    moves = {move for name in record.grid for move in driver.assignments[name].transfers}
    assert not any(move.follows for move in moves)
    assert {move.section for move in moves if record.grid[move.source_rank] == "w3"} <= {2, 3, 6, 7}
    [text] = [event.text for event in driver.told(Notice) if "going back" in event.text]
    assert "from step 9 to step 7, whose state other workers have in memory" in text


def test_an_older_one_stays_while_more_of_it_may_be_lost(driver: Driver) -> None:
    """w2 has not received its copy of w0's state of step 7, so only w0 has that state."""
    driver.kill("w1")
    answer(driver, "w0", 4, 7)
    both = {4: (0, 1, 4, 5), 7: (4, 5)}
    kept = tuple(HeldCheckpoint(generation=0, step=step, sections=sections) for step, sections in both.items())
    driver.say("w2", StopReport(generation=0, next_step=9, sections=(4, 5), checkpoints=kept))
    answer(driver, "w3", 4, 7)
    assert driver.fleet.record.first_step == 7
    assert driver.fleet.record.memory_steps == (7, 4)


def test_a_step_that_a_rollback_took_back_is_not_that_step_though_it_was_done_again(driver: Driver) -> None:
    """A worker that was away during the rollback may still hold the step as it was before."""
    driver.kill("w1")
    for worker in ("w0", "w2", "w3"):
        answer(driver, worker, 4)
    assert (driver.fleet.generation, driver.fleet.record.first_step) == (1, 4)
    driver.voted(4, 5, 6, 7, 8)
    holdings = {
        name: WorkerInventory(
            checkpoints=tuple(HeldCheckpoint(generation=0, step=step, sections=tuple(range(8))) for step in (3, 4, 7))
        )
        for name in ("w0", "w2")
    }
    workers = driver.fleet.workers
    for name, holding in holdings.items():
        workers = workers.with_worker(changed(workers[name], holding=holding))
    found = in_memory(replace(driver.fleet, workers=workers), holdings)
    assert [each.step for each in found] == [4, 3]


def test_what_is_whole_of_an_older_step_alone_counts(driver: Driver) -> None:
    driver.kill("w1")
    answer(driver, "w0", 4, 7)
    answer(driver, "w2", 4, 7)
    answer(driver, "w3", 4)
    assert driver.fleet.record.first_step == 4


@pytest.mark.parametrize(("saved", "first", "from_memory"), [(8, 8, False), (4, 4, True), (2, 4, True)])
def test_the_newer_one_of_store_and_memory_is_taken(driver: Driver, saved: int, first: int, from_memory: bool) -> None:
    driver.checkpoint = Checkpoint("ck", saved, 2)
    driver.feed(CheckpointCompleted(saved))
    driver.kill("w1")
    for worker in ("w0", "w2", "w3"):
        answer(driver, worker, 4)
    assert (driver.fleet.record.first_step, driver.fleet.record.from_memory) == (first, from_memory)


@pytest.mark.parametrize(
    ("generation", "step", "sections"),
    [(0, 4, (2, 3)), (1, 4, (0, 1)), (7, 4, (0, 1)), (0, 4, (0, 1, 2, 3, 6, 7))],
    ids=["of a stranger's seat", "of a generation to come", "of none", "of everybody"],
)
def test_a_worker_is_believed_only_what_its_seat_can_have(
    driver: Driver, generation: int, step: int, sections: tuple[int, ...]
) -> None:
    kept = (HeldCheckpoint(generation=generation, step=step, sections=sections),)
    held = StopReport(generation=0, next_step=9, sections=driver.seat_sections("w0"), checkpoints=kept)
    assert "memory checkpoint" in str(objection(driver.fleet, "w0", held))


@dataclass
class Kept:
    """A worker's true part of a memory checkpoint."""

    timeline: int
    own: set[int]
    others: set[int] = field(default_factory=set)

    @property
    def sections(self) -> set[int]:
        return self.own | self.others


class KeepingFleet(SimulatedFleet):
    """A fleet whose workers make memory checkpoints after every step, and go back to them."""

    def __init__(self, driver: Driver, *, checkpoints: bool, alone: bool = True) -> None:
        self.kept: dict[str, dict[tuple[int, int], Kept]] = {}
        self.everywhere: dict[int, int] = {}  # by generation: the newest step that its ranks know to be everywhere
        self.bases: list[tuple[int, int]] = []  # of timelines: generation and first step
        self.recalled = 0
        driver.plan = keeping if alone else keeping_or_not
        super().__init__(driver, checkpoints=checkpoints)

    def feed(self, event: Event) -> None:
        """Whatever happens next, the manager knows by then of each checkpoint in the store."""
        due = self.recorded[-1] + 1 if self.checkpoints and self.recorded and self.recorded[-1] % 3 == 2 else 0
        if due and due != self.driver.fleet.recorded.saved_step:
            super().feed(CheckpointCompleted(due))
        super().feed(event)

    def is_true(self, step: int, kept: Kept) -> bool:
        """Whether it is the state of that step on the way that the run has taken."""
        return all(base >= step for timeline, base in self.bases if timeline > kept.timeline)

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Publish(event=GenerationStarted(record=record)) if record.rollback:
                assert record.first_step >= self.newest_whole(), "as little as can be is done again"
                super().carry_out(instruction)
                self.bases.append((record.generation, record.first_step))
                if record.from_memory:
                    self.recalled += 1
            case _:
                super().carry_out(instruction)

    def newest_whole(self) -> int:
        """The newest step of which those that are left truly have all state."""
        sections: dict[int, set[int]] = {}
        for worker in self.known():
            for (_, step), each in self.kept.get(worker.name, {}).items():
                if self.is_true(step, each):
                    sections.setdefault(step, set()).update(each.sections)
        return max((step for step, held in sections.items() if len(held) == SECTIONS), default=0)

    def learn(self, worker: SimulatedWorker) -> None:
        """With the vote comes which checkpoint is everywhere; a next one is made after the step."""
        before = worker.next_step
        super().learn(worker)
        if worker.next_step == before or worker.next_step is None or worker.assignment is None:
            return
        assignment, generation = worker.assignment, worker.generation
        self.kept[worker.name] = mine = {
            key: each
            for key, each in self.kept.get(worker.name, {}).items()
            if key[0] == generation or key[1] in assignment.memory_steps
        }
        known = self.everywhere.get(generation)
        if known is not None and known < worker.next_step:
            self.kept[worker.name] = mine = {
                key: each for key, each in mine.items() if key[0] == generation and key[1] >= known
            }
        if worker.assignment.plan.copies is not Copies.STATE:
            mine.clear()
        else:
            newest = max((step for made, step in mine if made == generation), default=-1)
            if newest == (known if known is not None else -1):  # one at a time
                key = generation, worker.next_step
                mine.setdefault(key, Kept(worker.timeline, set())).own = set(worker.needed)

    def send(self, worker: SimulatedWorker) -> None:
        """Bring what its owner has made to a keeper."""
        assignment = worker.assignment
        if assignment is None or assignment.copy_from is None or not (worker.alive and worker.is_ready):
            return
        source = self.workers[self.members(assignment)[assignment.copy_from]]
        if not source.alive or source.stopped or source.generation != worker.generation:
            return
        made = [key for key, each in self.kept.get(source.name, {}).items() if key[0] == worker.generation and each.own]
        if made:
            key = max(made)
            its = self.kept[source.name][key]
            mine = self.kept.setdefault(worker.name, {}).setdefault(key, Kept(its.timeline, set()))
            mine.others = set(its.own)

    def vote(self) -> None:
        """Ranks say in it whether their newest has come to its keeper."""
        fleet = self.driver.fleet
        before = self.votes.get(fleet.generation)
        super().vote()
        if self.votes.get(fleet.generation) == before:
            return
        grid = [self.workers[name] for name in fleet.record.grid]
        steps = [
            {
                step
                for (made, step), each in self.kept.get(w.name, {}).items()
                if made == fleet.generation and each.own and each.others
            }
            for w in grid
        ]
        if everywhere := set[int].intersection(*steps) if steps else set():
            self.everywhere[fleet.generation] = max(everywhere)

    def take(self, worker: SimulatedWorker, assignment: Assignment) -> None:
        if not assignment.from_memory:
            super().take(worker, assignment)
            return
        assert worker.stopped
        worker.generation, worker.assignment = assignment.generation, assignment
        worker.stopped = worker.flag = False
        worker.recorded_step, worker.loading = assignment.next_step - 1, True

    def fetch(self, worker: SimulatedWorker) -> None:
        """Sections of a memory checkpoint come from where the manager says that they are."""
        assignment = worker.assignment
        was_loading = worker.loading
        if was_loading and assignment is not None and assignment.from_memory and worker.alive and not worker.stopped:
            step, come = (
                assignment.next_step,
                {m.section: m for m in assignment.transfers if m.target_rank == worker.rank},
            )
            for section in worker.stage:
                source = worker
                if section in come:
                    source = self.workers[self.members(assignment)[come[section].source_rank]]
                    if not source.alive or source.generation != assignment.generation:
                        return
                has = [each for (_, of), each in self.kept.get(source.name, {}).items() if of == step]
                assert any(section in each.sections and self.is_true(step, each) for each in has), "it was promised"
        super().fetch(worker)
        if was_loading and not worker.loading:
            assert assignment is not None
            self.kept[worker.name] = {
                key: e for key, e in self.kept.get(worker.name, {}).items() if key[1] in assignment.memory_steps
            }

    def deliver(self, worker: SimulatedWorker) -> None:
        """A worker that has stopped tells what it has."""
        if worker.outbox and isinstance(worker.outbox[0], StopReport):
            held = tuple(
                HeldCheckpoint(generation=made, step=step, sections=tuple(sorted(each.sections)))
                for (made, step), each in self.kept.get(worker.name, {}).items()
                if each.sections
            )
            message = worker.outbox[0]
            worker.outbox[0] = message.model_copy(update={"checkpoints": held})
            alone = StopReport(generation=message.generation, next_step=None, checkpoints=held)
            if self.driver.fleet.is_joined(worker.name):
                assert objection(self.driver.fleet, worker.name, alone) is None
        super().deliver(worker)


def test_whoever_dies_the_run_goes_back_to_what_is_whole_and_true() -> None:
    recalled = 0
    seeds = by_depth(20, 200)
    for seed in range(seeds):
        choose = random.Random(seed)
        driver = stormy(choose.randint(3, 6), "deep")
        fleet = KeepingFleet(driver, checkpoints=choose.random() < 0.3, alone=seed % 3 > 0)
        for _ in range(3):
            fleet.round()
        deaths = choose.choice([0.3, 1])
        weights = usual(fleet, deaths, votes=10, learns=30) | {fleet.send: 60, fleet.notice: deaths / 2}
        storm(fleet, choose, weights, 500)
        recalled += fleet.recalled
    assert recalled > seeds / 4
