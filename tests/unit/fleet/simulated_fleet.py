"""Simulated workers around the real state machine: what the manager decides is checked against what they truly hold.

Nothing happens by itself. A test chooses what happens next (a message arrives, a worker obeys one, a section comes,
the vote reaches a rank, a worker dies), and the fleet asserts on the way. The seams for other worlds are ``driver``
(settings, planner, job, the machine itself), ``carry_out`` (what an instruction does) and the acts, one method each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.unit.fleet.support import (
    Driver,
    by_class,
    make_job,
    make_plan,
    make_vote,
    preempted,
    two_stages,
    unlike_pipelines,
)
from varuna.core.devices import WorkerGroups, device_of, region_of, region_of_zone
from varuna.core.messages import (
    Apply,
    Assign,
    Assignment,
    Beat,
    Finish,
    FromWorker,
    Hold,
    Leaving,
    RaiseFlag,
    Recorded,
    StopReport,
    ToWorker,
    TrainingOver,
    Vote,
    Voted,
)
from varuna.core.model import JobFacts, Memory
from varuna.core.node_notices import ZoneNotice
from varuna.core.plan import Plan
from varuna.core.sharded_optimizer import Holders, holders_of
from varuna.fleet.agent.worker_record import WorkerRecord
from varuna.fleet.manager.reconcile import Reconciliation, node_of, reconcile
from varuna.fleet.manager.resume import lost_workers, resume
from varuna.fleet.net.protocol import Exited
from varuna.fleet.run_folder.journal import Past
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import (
    DrainRequested,
    Event,
    MessageReceived,
    MorphRequested,
    NoticeReceived,
    Tick,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Instruction, Kill, Publish, Send
from varuna.fleet.state.phases import Running
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import GenerationStarted, StepRecorded
from varuna.fleet.state.stutter import SLOW_RATIO
from varuna.fleet.state.worker import WorkerStatus

SECTIONS, STEPS = 4, 400


@dataclass
class SimulatedWorker:
    """A worker with what it truly holds. ``timeline`` is the generation that last loaded or made fresh state."""

    name: str
    shared: bool = False
    """Optimizer state is shared out: it holds some sections whole and, once they have come round, the others lent."""
    alive: bool = True
    generation: int = -1
    assignment: Assignment | None = None
    next_step: int | None = None
    timeline: int = -1
    sections: set[int] = field(default_factory=set)
    lent: set[int] = field(default_factory=set)
    copies: set[int] = field(default_factory=set)
    """Sections of another worker, as they are after ``copied_step`` steps."""
    copied_step: int = -1
    """The step of that worker of which it has the last sums."""
    reduced: int | None = None
    votes: list[Vote] = field(default_factory=list)
    recorded_step: int = -1
    stopped: bool = True
    flag: bool = False
    loading: bool = False
    over: bool = False
    """It has applied the last step, and leaves soon."""
    left: bool = False
    inbox: list[ToWorker] = field(default_factory=list)
    outbox: list[FromWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = WorkerRecord(self.name)  # what its agent remembers, for a manager that starts again

    def say(self, *messages: FromWorker) -> None:
        self.outbox += messages
        for message in messages:
            self.record.note_from_worker(message)

    @property
    def rank(self) -> int:
        assert self.assignment is not None
        return self.assignment.rank

    @property
    def stage(self) -> set[int]:
        if self.assignment is None or self.assignment.is_spare:
            return set()
        plan = self.assignment.plan
        return set(plan.sections_at(self.rank))

    @property
    def needed(self) -> set[int]:
        """Sections that it needs whole."""
        if not self.stage:
            return set()
        return {section for section in self.stage if self.replica in self.holders[section]}

    @property
    def holders(self) -> Holders:
        assert self.assignment is not None
        return holders_of(self.assignment.plan, make_job(sections=SECTIONS).model.sections, shared=self.shared)

    @property
    def replica(self) -> int:
        assert self.assignment is not None
        return self.assignment.plan.place_of(self.rank).replica

    @property
    def whole(self) -> set[int]:
        """Sections that others may have from it: its own, and copies of the same step."""
        return self.sections | (self.copies if self.copied_step == self.next_step else set())

    @property
    def is_ready(self) -> bool:
        """Has all of its stage."""
        return not (self.stopped or self.loading) and self.needed <= self.sections and self.is_complete

    @property
    def is_complete(self) -> bool:
        return self.stage <= self.sections | self.lent

    def stop(self) -> None:
        self.stopped = True
        self.report()

    def report(self) -> None:
        unrecorded = tuple(vote for vote in self.votes if vote.step > self.recorded_step)
        self.say(
            StopReport(
                generation=self.generation,
                next_step=self.next_step,
                sections=tuple(sorted(self.sections)),
                lent=tuple(sorted(self.lent)),
                votes=unrecorded,
                copies=tuple(sorted(self.whole - self.sections)),
            )
        )

    def apply(self, vote: Vote) -> None:
        assert self.next_step == vote.step, "only who is one step behind may apply"
        assert self.reduced == vote.step, "only who has reduced gradients may apply"
        assert self.needed <= self.sections
        self.next_step = vote.step + 1
        self.votes.append(vote)
        self.sections, self.lent = self.needed, set()  # what else it held is old now


def one_stage(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    return make_plan(job, workers, micro_batch, stages=1)


PLANNERS: dict[str, Callable[[JobFacts, WorkerGroups, int | None], Plan]] = {
    "one stage": one_stage,
    "two stages": two_stages,
    "deep": make_plan,
    "unlike": unlike_pipelines,
    "by class": by_class,
}


def stormy(workers: int, planner: str, *, shared: bool = False) -> Driver:
    """Return a machine that replaces its workers; with the planner "by class", half of the devices are of another."""
    job = make_job(sections=SECTIONS, steps=STEPS).model_copy(update={"memory": Memory(shard_optimizer=shared)})
    return Driver(
        FleetConfig(workers=workers, max_start_failures=10_000, slow_ratio=SLOW_RATIO),
        plan=PLANNERS[planner],
        class_of=lambda worker: "ab"[int(worker[1:]) % 2] if planner == "by class" else "",
        job=job,
        node_of=lambda worker: worker,
    )


class SimulatedFleet:
    """Simulated workers around the real machine; every choice comes from the test."""

    def __init__(self, driver: Driver, *, checkpoints: bool) -> None:
        self.driver, self.checkpoints = driver, checkpoints
        self.steps, self.shared = driver.job.steps, driver.job.memory.shard_optimizer
        self.workers: dict[str, SimulatedWorker] = {}
        self.votes: dict[int, tuple[Vote, bool]] = {}  # by generation: the newest, with its regroup flag
        self.recorded: list[int] = []
        self.generations: list[int] = []
        self.timeline, self.base = -1, 0  # the generation that last began from a checkpoint or afresh, and its step
        self.newest_vote: Vote | None = None
        self.seen = 0
        self.sync()

    # -- between the machine and the workers

    def feed(self, event: Event) -> None:
        if self.checkpoints and self.recorded and self.recorded[-1] % 3 == 2:
            self.driver.checkpoint = Checkpoint("ck", self.recorded[-1] + 1, 2)
        self.driver.feed(event)
        self.sync()

    def sync(self) -> None:
        """Carry out what the machine said since last time."""
        for number in range(len(self.workers), self.driver.names):
            self.workers[f"w{number}"] = SimulatedWorker(f"w{number}", self.shared)
        news, self.seen = self.driver.done[self.seen :], len(self.driver.done)
        for instruction in news:
            self.carry_out(instruction)

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send(worker=name, message=message):
                self.workers[name].inbox.append(message)
            case Kill(worker=name):
                self.workers[name].alive = False
            case Publish(event=GenerationStarted(record=record)):
                for rank, name in enumerate(record.grid):
                    wanted, zone = record.plan.class_of(rank), self.driver.fleet.machines.zones.get(name, "")
                    assert device_of(wanted) in ("", self.driver.class_of(name)), "a seat on another device"
                    assert region_of(wanted) in ("", region_of_zone(zone)), "a seat in another region"
                self.check_generation(record.generation, record.first_step, rollback=record.rollback)
            case Publish(event=StepRecorded(step=step)):
                assert step == (self.recorded[-1] + 1 if self.recorded else 0), "steps are recorded in order, once"
                self.recorded.append(step)
                self.newest_vote = self.driver.fleet.recorded.votes.get(step)
            case _:
                pass

    def known(self) -> list[SimulatedWorker]:
        """Whom the machine believes to be alive and joined."""
        return [self.workers[name] for name in self.driver.fleet.joined]

    def belongs(self, worker: SimulatedWorker, number: int) -> bool:
        """Whether a worker's state is of this timeline; where timelines part, they are equal."""
        at_base = worker.next_step == self.base and worker.generation == number - 1 and bool(worker.stage)
        return worker.timeline == self.timeline or at_base

    def check_generation(self, number: int, first_step: int, *, rollback: bool) -> None:
        assert not self.generations or number == self.generations[-1] + 1
        holders = [w for w in self.known() if w.next_step is not None and self.belongs(w, number)]
        newest = max([w.next_step or 0 for w in holders] + [self.recorded[-1] + 1 if self.recorded else 0])
        held = set[int]()
        for worker in holders:
            if worker.next_step == newest:
                held |= worker.whole
            elif worker.next_step == worker.reduced == newest - 1 and worker.generation == number - 1:
                held |= worker.needed  # one step behind, but able to apply it
        if rollback:
            assert held != set(range(SECTIONS)), "no rollback while every section has a holder"
            self.recorded = [step for step in self.recorded if step < first_step]
            self.timeline, self.base = number, first_step
        else:
            assert first_step == newest, "no committed step is lost"
            assert all(w.next_step == newest for w in holders if w.generation == number - 1 and w.stage)
            assert held == set(range(SECTIONS))
        self.generations.append(number)

    # -- what can happen

    def someone(self, number: int) -> SimulatedWorker:
        """A living worker; time passes until there is one."""
        while not (alive := [worker for worker in self.workers.values() if worker.alive]):
            self.tick()
        return alive[number % len(alive)]

    def start(self, node: str) -> None:
        """An agent starts a worker."""
        name = f"{node}.{len(self.workers)}"
        self.workers[name] = SimulatedWorker(name, self.shared)
        self.feed(WorkerSpawned(name, node))

    def deliver(self, worker: SimulatedWorker) -> None:
        if worker.outbox:
            self.feed(MessageReceived(worker.name, worker.outbox.pop(0)))

    def hello(self, worker: SimulatedWorker) -> None:
        known = self.driver.fleet.workers.get(worker.name)
        if worker.alive and known is not None and known.standing is WorkerStatus.STARTING:
            hello = self.driver.hello_of(worker.name)
            worker.record.note_from_worker(hello)
            self.feed(MessageReceived(worker.name, hello))

    def obey(self, worker: SimulatedWorker) -> None:
        """Process one message of the manager."""
        if not worker.alive or not worker.inbox:
            return
        message = worker.inbox.pop(0)
        worker.record.note_from_manager(message)
        match message:
            case Assign(assignment=assignment) if not worker.over:
                self.take(worker, assignment)
            case Hold(generation=generation) if worker.over:
                if not worker.left:  # its loop is over, whatever began meanwhile
                    worker.generation = max(worker.generation, generation)
                    worker.stop()
            case Hold(generation=generation) if generation > worker.generation or (
                generation == worker.generation and not worker.stopped
            ):
                worker.generation = generation  # of which it was never told, if its manager died before
                worker.stop()
            case Apply(vote=vote):
                worker.apply(vote)
                worker.report()
            case RaiseFlag(generation=generation) if generation == worker.generation:
                worker.flag = True
            case Recorded(step=step):
                worker.recorded_step = step
            case Finish() | TrainingOver():
                self.check_dismissed(worker)
                worker.left, worker.alive = True, False
                self.feed(WorkerExited(worker.name, 0))
            case _:
                pass

    def check_dismissed(self, worker: SimulatedWorker) -> None:
        """Whoever is sent home because the last step is done has done it."""
        if self.driver.fleet.is_leaving and worker.name in self.driver.fleet.record.grid:
            assert worker.next_step == self.steps, "sent home without the last step"

    def members(self, assignment: Assignment) -> tuple[str, ...]:
        return self.driver.fleet.history[assignment.generation].members

    def take(self, worker: SimulatedWorker, assignment: Assignment) -> None:
        assert worker.stopped, "no assignment before the last generation is over"
        worker.generation, worker.assignment = assignment.generation, assignment
        worker.stopped = worker.flag = False
        worker.recorded_step = assignment.next_step - 1
        moves = [move for move in assignment.transfers if move.target_rank == assignment.rank]
        worker.loading = bool(assignment.fresh or assignment.checkpoint)
        if worker.loading:
            return  # until it has loaded, a worker still has its old state and its old votes
        if worker.next_step == assignment.next_step == self.base:
            worker.timeline = self.timeline
        worker.sections, worker.copies = worker.whole, set()  # until the generation has formed it has both
        if not assignment.is_spare:
            if worker.next_step != assignment.next_step or not worker.sections | worker.lent:
                worker.next_step, worker.sections, worker.lent = None, set(), set()
            whole = worker.sections | {move.section for move in moves if not move.lent}
            assert worker.needed <= whole, "every seat gets what it lacks"
            assert worker.stage <= whole | worker.lent | {move.section for move in moves}

    def fetch(self, worker: SimulatedWorker) -> None:
        """Load a checkpoint, or copy the next missing section from its source."""
        assignment = worker.assignment
        if worker.stopped or not worker.alive or assignment is None:
            return
        if worker.loading:
            worker.loading, worker.timeline, worker.reduced = False, assignment.generation, None
            worker.next_step = None if assignment.is_spare else assignment.next_step
            worker.sections, worker.votes = set(worker.needed), []
            worker.lent, worker.copies = worker.stage - worker.sections, set()
            return
        if worker.next_step not in (None, assignment.next_step):
            return  # it trains: what it lacks now comes with ``gather``
        for move in assignment.transfers:
            mine = worker.sections | worker.lent if move.lent else worker.sections
            if move.target_rank == assignment.rank and move.section not in mine:
                source = self.workers[self.members(assignment)[move.source_rank]]
                if not source.alive or source.generation != assignment.generation:
                    return
                assert source.next_step == assignment.next_step
                assert move.section in (source.sections | source.lent if move.lent else source.sections)
                (worker.lent if move.lent else worker.sections).add(move.section)
                worker.next_step, worker.timeline = source.next_step, source.timeline
                return

    def copy(self, worker: SimulatedWorker) -> None:
        """The state of the worker whose copy this one keeps has come, complete, while both are at the same step."""
        assignment = worker.assignment
        if assignment is None or assignment.copy_from is None or not (worker.alive and worker.is_ready):
            return
        source = self.workers[self.members(assignment)[assignment.copy_from]]
        if source.alive and source.is_ready and source.generation == worker.generation:
            assert source.rank + 1 == worker.rank or worker.rank == 0
            if source.next_step == worker.next_step:
                worker.copies, worker.copied_step = set(source.needed), worker.next_step or 0

    def gather(self, worker: SimulatedWorker) -> None:
        """The owners' new parameters reach a rank that has applied the step, if all of them live."""
        assignment = worker.assignment
        if worker.stopped or not worker.alive or assignment is None or worker.loading or worker.is_complete:
            return
        if worker.reduced is None or worker.next_step != worker.reduced + 1:
            return
        plan, members = assignment.plan, self.members(assignment)
        owners = {plan.home_of(worker.holders[each][0], each) for each in worker.stage - worker.sections}
        for owner in (self.workers[members[rank]] for rank in owners):
            if not owner.alive or owner.generation != worker.generation or owner.next_step != worker.next_step:
                return
        worker.lent = worker.stage - worker.sections

    def vote(self) -> None:
        """The grid of the newest generation finishes a step, if all of it can."""
        fleet = self.driver.fleet
        if not fleet.history:
            return
        grid = [self.workers[name] for name in fleet.record.grid]
        if not all(w.alive and w.is_ready and w.generation == fleet.generation and not w.left for w in grid):
            return
        steps = {w.next_step for w in grid}
        if len(steps) != 1 or (step := steps.pop()) is None:
            return
        if fleet.generation in self.votes and self.votes[fleet.generation][0].step >= step:
            return
        for worker in grid:
            worker.reduced = step
        self.votes[fleet.generation] = (make_vote(fleet.record.plan, fleet.generation, step), grid[0].flag)

    def learn(self, worker: SimulatedWorker) -> None:
        """The result of the vote reaches one rank, which applies the step."""
        found = self.votes.get(worker.generation)
        if found is None or not worker.alive or worker.stopped or worker.left:
            return
        vote, regroup = found
        if worker.reduced == worker.next_step == vote.step:
            worker.apply(vote)
            if worker.rank == 0:
                worker.say(Voted(vote=vote))
            if vote.step == self.steps - 1:
                worker.over = True
            elif regroup:
                worker.stop()

    def leave(self, worker: SimulatedWorker) -> None:
        """The loop is over; what nobody has written down is said again."""
        if worker.alive and worker.over and not worker.left:
            worker.left = True
            worker.say(*(Voted(vote=vote) for vote in worker.votes if vote.step > worker.recorded_step))
            worker.say(Leaving(step=self.steps))

    def die(self, worker: SimulatedWorker) -> None:
        worker.alive = False
        worker.outbox.clear()
        self.feed(WorkerExited(worker.name, -9))

    def restart_manager(self, worker: SimulatedWorker) -> None:
        """The manager dies, and what was on its way with it; the next one has the journal, and what agents remember.

        Meanwhile ``worker`` may die, too.
        """
        events = tuple(done.event for done in self.driver.done if isinstance(done, Publish))
        started = any(isinstance(event, GenerationStarted) for event in events)
        job = self.driver.job if started else None
        past = Past(run="r", job=job, version="1", vote=self.newest_vote, events=events)
        self.driver.fleet = resume(past, self.driver.config, self.driver.now_s)
        self.driver.open.clear()
        if len(self.driver.done) % 2:
            worker.alive = False
        for each in self.workers.values():
            each.inbox.clear()
            each.outbox.clear()
            each.record.exited = None if each.alive else Exited(code=-9)
        self.feed(Tick())
        for node in sorted({node_of(name) for name in self.workers}):
            here = tuple(each.record.snapshot() for each in self.workers.values() if node_of(each.name) == node)
            heard, fenced = reconcile(self.driver.fleet, lost_workers(past), Reconciliation(node, here))
            for name in fenced:
                self.workers[name].alive = False
            for event in heard:
                self.feed(event)

    def notice(self, worker: SimulatedWorker) -> None:
        """Its node will be taken away, sooner or later than it takes to leave it."""
        self.feed(preempted(worker.name, in_s=len(self.driver.done) % 7))

    def drain(self, worker: SimulatedWorker) -> None:
        self.feed(DrainRequested(worker.name))

    def place(self, worker: SimulatedWorker) -> None:
        """Its machine says where it is, or that it was somewhere else."""
        zones = "a/1", "a/2", "b/1"
        self.feed(NoticeReceived(worker.name, ZoneNotice(zone=zones[len(self.driver.done) % 3])))

    def ask(self, _: SimulatedWorker) -> None:
        self.feed(MorphRequested())

    def vote_and_tick(self, _: SimulatedWorker) -> None:
        """Let all vote, and time pass: this happens to all at once."""
        self.vote()
        self.tick()

    def freeze(self, worker: SimulatedWorker) -> None:
        """It says nothing any more, and nobody knows."""
        if self.driver.fleet.is_joined(worker.name):
            worker.alive = False
            worker.outbox.clear()

    def tick(self) -> None:
        self.driver.now_s += 0.2
        for worker in self.workers.values():
            if worker.alive and worker.name in self.driver.fleet.workers:
                beat = Beat(generation=worker.generation, step=0, activity="", forward_s=1.0, backward_s=2.0)
                self.feed(MessageReceived(worker.name, beat))
        self.feed(Tick())

    def round(self) -> None:
        """Everybody does everything once."""
        for worker in list(self.workers.values()):
            self.hello(worker)
            for _ in range(4):
                self.deliver(worker)
                self.obey(worker)
                self.fetch(worker)
            self.learn(worker)
        for worker in self.workers.values():
            self.gather(worker)
        self.vote()
        self.tick()

    def check_liveness(self) -> None:
        """Left alone, the run gets on."""
        goal = len(self.driver.told(StepRecorded)) + 2
        for _ in range(400):
            if isinstance(self.driver.fleet.phase, Running) and len(self.driver.told(StepRecorded)) >= goal:
                break
            self.round()
        assert isinstance(self.driver.fleet.phase, Running), (self.driver.fleet.phase, self.driver.end)
        assert len(self.driver.told(StepRecorded)) >= goal
