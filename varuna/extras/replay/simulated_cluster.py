"""Simulated workers around the real state machine, in virtual time.

A generation's ranks move in step, so one clock serves all of them: it forms, runs steps of the planned length, and is
stuck from the moment when a member of it is gone until the machine has noticed and said Hold.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace

from varuna.core.messages import (
    Assign,
    Assignment,
    Finish,
    FromWorker,
    Hello,
    Hold,
    RaiseFlag,
    StopReport,
    TrainingOver,
    Vote,
    Voted,
)
from varuna.core.model import JobFacts
from varuna.core.node_notices import Preemptible, PreemptionNotice
from varuna.core.plan import Copies, Plan
from varuna.core.saved import SAVED_EVERY_S, paying_every_s
from varuna.core.sums import HeldSums
from varuna.core.vote import VoteLayout
from varuna.extras.replay.broken_steps import BrokenSteps
from varuna.extras.replay.costs import MorphCosts
from varuna.extras.replay.held import held_sums
from varuna.extras.replay.job import state_bytes
from varuna.extras.replay.kept import KeptStates
from varuna.extras.replay.life import Life, SimulatedWorker, beat_of, patient
from varuna.extras.replay.lost import Account, LostBy, OutageSpan
from varuna.extras.replay.moving import Moves
from varuna.extras.replay.saved import StepSaves, Stored
from varuna.fleet.machine.advance import advance
from varuna.fleet.manager.answering import Planner, plan_answer
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    AnswerReceived,
    Event,
    MessageReceived,
    NoticeReceived,
    Tick,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Ask, Instruction, Kill, Publish, Send
from varuna.fleet.state.phases import Idle, Running
from varuna.fleet.state.questions import Checkpoint, FoundCheckpoint, WhichCheckpoint
from varuna.fleet.state.run_events import RunEvent
from varuna.fleet.state.speeds import Speeds

_QUICK_S, _SLOW_S = 0.5, 30.0  # between ticks: while something is under way, and else


class SimulatedCluster:
    """A job on a cluster whose nodes come and go; ``on_event`` gets the state machine's events with their times."""

    def __init__(
        self,
        job: JobFacts,
        planner: Planner,
        costs: MorphCosts,
        broken_steps: BrokenSteps,
        *,
        most_workers: int,
        link_bytes_per_s: float,
        on_event: Callable[[float, RunEvent], None],
        account: Account,
    ) -> None:
        self._job, self._costs, self._on_event = job, costs, on_event
        self._broken_steps, self._account = broken_steps, account
        self._link_bytes_per_s = link_bytes_per_s
        self._bytes = state_bytes(job)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._workers: dict[str, SimulatedWorker] = {}
        self._nodes: dict[str, list[str]] = {}
        self._numbers = itertools.count()
        self._life, self._moves = Life(), Moves(job, link_bytes_per_s)
        self._kept: KeptStates | None = None
        self._stored = Stored(broken_steps)
        self._saved_s = 0.0
        self._joined_s = float("-inf")
        self._grid: frozenset[str] = frozenset()
        self.now_s = 0.0
        self.training_s = 0.0
        self.checkpoints_s: list[float] = []
        self._planner = planner
        self.fleet = replace(Fleet.empty(patient(most_workers), 0.0), speeds=Speeds(link_bytes_per_s=link_bytes_per_s))
        self._schedule(0.0, self._tick)

    # -- time ------------------------------------------------------------------------------------------------

    def run_until(self, end_s: float) -> None:
        """Run all events that are due by ``end_s``."""
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
        self.now_s = end_s

    def _schedule(self, at_s: float, act: Callable[[], None]) -> None:
        # the number decides between events of one moment: functions have no order, and replays must not differ
        heapq.heappush(self._heap, (at_s, next(self._order), act))

    def _tick(self) -> None:
        """Tick, and schedule the next one; quiet times need few."""
        self._feed(Tick())
        self._schedule(self.now_s + (_QUICK_S if self._is_busy() else _SLOW_S), self._tick)

    def _is_busy(self) -> bool:
        """Return whether a deadline of the state machine may be near."""
        fleet = self.fleet
        if not isinstance(fleet.phase, Running | Idle) or (isinstance(fleet.phase, Running) and not fleet.formed):
            return True
        return bool(fleet.machines.departing) or self.now_s < self._joined_s + 2

    @property
    def unfinished(self) -> float:
        """Share of the step in flight that is done."""
        life, assignment = self._life, self._workers[self.fleet.members[0]].assignment if self.fleet.history else None
        if life.began_s is None or life.over or assignment is None or any(name in life.gone_s for name in self._grid):
            return 0.0
        plan = assignment.plan
        return max(0.0, self.now_s - life.began_s) / (plan.step_s * self._broken_steps.longer(plan))

    # -- the cloud -------------------------------------------------------------------------------------------

    def add(self, node: str, gpus: int) -> None:
        """Add a VM; its workers join once they are warm."""
        self._feed(NoticeReceived(node, Preemptible()))
        names = [f"w{next(self._numbers)}" for _ in range(gpus)]
        self._nodes[node] = names
        self._account.workers(self.now_s, there=gpus)
        for name in names:
            self._workers[name] = SimulatedWorker(name)
            self._feed(WorkerSpawned(name, node))
            self._schedule(self.now_s + self._costs.warm_s, lambda name=name: self._join(name))  # type: ignore[misc]

    def warn(self, node: str, deadline_s: float) -> None:
        """Give the cloud's notice that it will take a VM back."""
        self._feed(
            NoticeReceived(node, PreemptionNotice(in_s=max(0.0, deadline_s - self.now_s), reason="preemption notice"))
        )

    def remove(self, node: str) -> None:
        """Remove a VM, without a notice."""
        names = self._nodes.pop(node)
        self._account.workers(self.now_s, there=-len(names), warm=-sum(self._workers[name].warm for name in names))
        for name in names:
            if self._workers[name].alive:
                self._workers[name].alive = False
                self._life.gone_s[name] = self.now_s
                self._stall_without(name)
                self._schedule(self.now_s + self._costs.lease_s, lambda name=name: self._miss(name))  # type: ignore[misc]

    def _miss(self, name: str) -> None:
        """Let the manager know that a worker is gone, a lease after its last beat; others' beats say nothing new."""
        if name in self.fleet.workers:
            self._feed(WorkerExited(name, -9))
            self._tick_once()

    def _tick_once(self) -> None:
        """Tick at once, and quickly from now on."""
        self._heap = [entry for entry in self._heap if entry[2] != self._tick]
        heapq.heapify(self._heap)
        self._tick()

    def _join(self, name: str) -> None:
        if self._workers[name].alive:
            self._joined_s = self.now_s
            self._workers[name].warm = True
            self._account.workers(self.now_s, warm=1)
            self._say(name, Hello(worker=name, pid=1, version="replay", job=self._job))
            self._tick_once()

    # -- the machine -----------------------------------------------------------------------------------------

    def _say(self, name: str, message: FromWorker) -> None:
        self._feed(MessageReceived(name, message))

    def _feed(self, event: Event) -> None:
        self.fleet, instructions = advance(self.fleet, event, self.now_s)
        for instruction in instructions:
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case Publish(event=event):
                self._on_event(self.now_s, event)
            case Kill(worker=name):
                self._workers[name].alive = False
            case Ask(question=question, number=number):
                self._note_saved()
                answer = (
                    FoundCheckpoint(self._stored.checkpoint)
                    if isinstance(question, WhichCheckpoint)
                    else plan_answer(
                        self._planner, lambda plan: plan.step_s, question, instruction.job, instruction.running
                    )
                )
                self._feed(AnswerReceived(question, number, answer))
            case Send(worker=name, message=message) if self._workers[name].alive:
                self._hear(self._workers[name], message)
            case _:
                pass  # nodes come by the trace alone

    def _note_saved(self) -> None:
        if self._life.formed:
            members = self.fleet.history[self._life.generation].members
            self._stored.note_end(self._life, [self._workers[name] for name in members], self.now_s)

    def _hear(self, worker: SimulatedWorker, message: object) -> None:
        life = self._life
        match message:
            case Assign(assignment=assignment):
                self._take(worker, assignment)
            case Hold(generation=generation) if generation == life.generation:
                life.over = True
                life.held_s = self.now_s if life.held_s is None else life.held_s
                self._stall(LostBy.REGROUPING)
                self._schedule(self.now_s + self._costs.stop_s, lambda: self._report(worker, generation))
            case RaiseFlag(generation=generation, flag="regroup") if generation == life.generation:
                life.regroup = True
            case RaiseFlag(generation=generation, flag="checkpoint") if generation == life.generation:
                life.save = True
            case Finish() | TrainingOver():
                worker.alive = False
                self._schedule(self.now_s, lambda: self._feed(WorkerExited(worker.name, 0)))
            case _:
                pass

    def _report(self, worker: SimulatedWorker, generation: int) -> None:
        if worker.alive and generation == self._life.generation:
            worker.sums = self._sums(worker)
            sections = tuple(sorted(worker.sections | worker.copied | worker.kept))
            held = StopReport(
                generation=generation,
                next_step=worker.next_step,
                sections=sections,
                sums=worker.sums,
                checkpoints=worker.checkpoints,
            )
            self._say(worker.name, held)

    def _sums(self, worker: SimulatedWorker) -> HeldSums | None:
        """Return a worker's sums of a broken step: of this generation, or of one before if it did not form."""
        life, assignment = self._life, worker.assignment
        if not life.formed or assignment is None or not self._costs.keeps_sums:
            return worker.sums
        worker.copied = frozenset()
        if life.began_s is None or life.held_s is None or assignment.is_spare:
            return None
        members = [self._workers[name] for name in self._members(assignment)]
        return held_sums(worker, members, assignment, life, self._broken_steps)

    # -- a generation ----------------------------------------------------------------------------------------

    def _take(self, worker: SimulatedWorker, assignment: Assignment) -> None:
        """Let a worker take its part; when the last one has, the generation forms."""
        if assignment.generation != self._life.generation:
            self._note_saved()
            self._life = Life(assignment.generation, set(self._members(assignment)))
            self._moves = Moves(self._job, self._link_bytes_per_s)
        worker.assignment = assignment
        self._moves.add(assignment.rank, assignment.transfers)
        self._life.waiting.discard(worker.name)
        if not self._life.waiting:
            generation = assignment.generation
            copy_s = self._copy_s(assignment)
            self._stall(LostBy.MOVING if assignment.checkpoint is None else LostBy.LOADING)
            self._schedule(self.now_s + copy_s, lambda: self._moved(generation))
            self._schedule(self.now_s + self._costs.form_s + copy_s, lambda: self._formed(generation, assignment))

    def _moved(self, generation: int) -> None:
        """Note that state is where it is wanted; what is left is to form the groups."""
        if generation == self._life.generation and not self._life.over:
            self._stall(LostBy.REGROUPING)

    def _stall(self, why: LostBy) -> None:
        self._account.does(self.now_s, OutageSpan(why))

    def _stall_without(self, name: str) -> None:
        """Stall the run without a worker that is gone, which the manager does not know yet."""
        if self._life.began_s is not None and not self._life.over and name in self._grid:
            self._stall(LostBy.NOTICING)

    def _copy_s(self, assignment: Assignment) -> float:
        """Return the seconds until all have what they compute with."""
        if assignment.checkpoint is not None:
            return max(self._bytes_by_slot(assignment.plan)) / self._costs.load_bytes_per_s
        return self._moves.first_s

    def _members(self, assignment: Assignment) -> tuple[str, ...]:
        """Return the worker of each rank."""
        return self.fleet.history[assignment.generation].members

    def _bytes_by_slot(self, plan: Plan) -> list[int]:
        return [sum(self._bytes[section] for section in slot.sections) for slot in plan.slots]

    def _is_stuck(self, generation: int, assignment: Assignment, *, forming: bool) -> bool:
        """Return whether the generation was ended, or waits for a worker that is gone."""
        members = self._members(assignment)[: None if forming else assignment.plan.workers]
        return (
            generation != self._life.generation
            or self._life.over
            or not all(self._workers[name].alive for name in members)
        )

    def _formed(self, generation: int, assignment: Assignment) -> None:
        if self._is_stuck(generation, assignment, forming=True):
            return
        plan, self._life.formed = assignment.plan, True
        self._moves.seat([self._workers[name] for name in self._members(assignment)], assignment)
        self._grid = frozenset(self._members(assignment)[: plan.workers])
        self._kept = None
        if self.fleet.history[generation].keepers and self._costs.copies and plan.copies is Copies.STATE:
            self._kept = KeptStates(
                plan,
                self._job,
                link_bytes_per_s=self._link_bytes_per_s,
                snapshot_bytes_per_s=self._costs.snapshot_bytes_per_s,
                losses_per_hour=assignment.losses_per_hour,
            )
        self._beat(assignment)
        self._schedule(self.now_s + self._moves.rest_s, lambda: self._arrived(generation, assignment))
        self._begin_step(generation, assignment, assignment.next_step, 0.0)

    def _arrived(self, generation: int, assignment: Assignment) -> None:
        """Note that all ranks have all state; from now on no other one is needed as a source."""
        if not self._is_stuck(generation, assignment, forming=True):
            self._life.whole = True
            self._moves.arrived([self._workers[name] for name in self._members(assignment)], assignment)
            if self._kept is not None:
                self._keep(self._kept, assignment, assignment.next_step)
            self._beat(assignment)

    def _beat(self, assignment: Assignment) -> None:
        for name in self._members(assignment)[: assignment.plan.workers]:
            self._say(name, beat_of(assignment, whole=self._life.whole))

    def _begin_step(self, generation: int, assignment: Assignment, step: int, pause_s: float) -> None:
        if pause_s:
            self._stall(LostBy.SAVING)
        self._life.step, self._life.began_s = step, self.now_s + pause_s
        left = self.fleet.history[generation].remainder if step == assignment.next_step else None
        plan, is_first = assignment.plan, step == assignment.next_step
        rest_s = self._moves.rest_s if is_first else 0.0
        if is_first:  # what there is to keep is kept once all of it is there
            self._life.kept_s = self._copied_s(generation, rest_s)
        whole_s = plan.step_s * self._broken_steps.longer(plan)
        step_s = whole_s if left is None else self._broken_steps.seconds(plan, left.work)
        rate = plan.global_batch / whole_s
        doing = OutageSpan(LostBy.SPARES, rate, plan.global_batch / plan.step_s - rate)
        # each event names its generation and step, and does nothing if a morph has come between
        self._schedule(self._life.began_s, lambda: self._trains(generation, step, doing))
        if rest_s > step_s:
            self._schedule(
                self._life.began_s + step_s, lambda: self._trains(generation, step, OutageSpan(LostBy.MOVING))
            )
        over_s = max(step_s, rest_s)
        self._schedule(self._life.began_s + over_s, lambda: self._end_step(generation, assignment, step, over_s))

    def _trains(self, generation: int, step: int, doing: OutageSpan) -> None:
        life = self._life
        gone = any(name in life.gone_s for name in self._grid)
        if (generation, step) == (life.generation, life.step) and not life.over and not gone:
            self._account.does(self.now_s, doing)

    def _end_step(self, generation: int, assignment: Assignment, step: int, step_s: float) -> None:
        """End a step at its vote: all ranks apply, rank 0 reports, and the next step or the morph follows."""
        if self._is_stuck(generation, assignment, forming=False) or not self._life.whole:
            return
        plan, self._life.began_s = assignment.plan, None
        self.training_s += step_s
        grid = self._members(assignment)[: plan.workers]
        for name in grid:
            self._workers[name].next_step, self._workers[name].kept = step + 1, frozenset()
        layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches)
        vote = Vote(generation=generation, step=step, vector=(0.0,) * layout.size, wall_s=step_s)
        regroup = self._life.regroup
        self._say(grid[0], Voted(vote=vote))
        pause_s = self._maybe_save(assignment, step + 1) + self._maybe_keep(assignment, step + 1)
        if self._is_stuck(generation, assignment, forming=False):
            return
        if regroup:
            self._life.over = True
            self._stall(LostBy.REGROUPING)
            for name in self._members(assignment):
                self._report(self._workers[name], generation)
        else:
            self._begin_step(generation, assignment, step + 1, pause_s)

    def _maybe_keep(self, assignment: Assignment, step: int) -> float:
        """Make a memory checkpoint if one is due; return the seconds that it stops training."""
        kept = self._kept
        if kept is None:
            self._life.kept_s = self._copied_s(assignment.generation, 0.0)
            return 0.0
        is_due = kept.is_due(self.now_s)
        self._life.kept_s = kept.takes_s if is_due else float("inf")
        if is_due:
            self._keep(kept, assignment, step)
        return kept.stall_s if is_due else 0.0

    def _copied_s(self, generation: int, whole_s: float) -> float:
        """Return ``kept_s`` of a step whose state is whole after ``whole_s``, when it or its sums alone are kept."""
        if not (self.fleet.history[generation].keepers and self._costs.copies):
            return float("inf")
        return whole_s if self._kept is None else whole_s + self._kept.stall_s + self._kept.takes_s

    def _keep(self, kept: KeptStates, assignment: Assignment, step: int) -> None:
        """Let all ranks make a memory checkpoint."""
        generation, plan = assignment.generation, assignment.plan
        workers = [self._workers[name] for name in self._members(assignment)[: plan.workers]]
        kept.begin(workers, plan, step, generation, self.now_s)

        def end() -> None:
            if generation == self._life.generation and not self._life.over and all(w.alive for w in workers):
                kept.end(workers, plan, step, generation)

        self._schedule(self.now_s + kept.stall_s + kept.takes_s, end)

    def _maybe_save(self, assignment: Assignment, step: int) -> float:
        """Make a checkpoint if one is due; return the seconds that it stops training."""
        plan = assignment.plan
        share_bytes = max(self._bytes_by_slot(plan)) / plan.replicas
        stall_s, upload_s = self._costs.saving_s(share_bytes)
        every_s = min(SAVED_EVERY_S, paying_every_s(stall_s, assignment.losses_per_hour, plan))
        is_due = self._costs.checkpoints and self.now_s + plan.step_s / 2 >= self._saved_s + every_s
        if not (is_due or self._life.save):
            return 0.0
        self._life.save, self._saved_s, due_s = False, self.now_s, self.now_s + every_s
        sums = (sum(self._job.model.sections[each].summed_bytes for each in slot.sections) for slot in plan.slots)
        _, write_s = self._costs.saving_s(max(sums))
        grid = self._members(assignment)[: plan.workers]

        def commit() -> None:
            if all(self._workers[name].alive for name in grid):
                saves = StepSaves(step, max(self.now_s, due_s), every_s, write_s)
                checkpoint = Checkpoint(f"step-{step}", step, plan.micro_batch)
                self._stored.commit(checkpoint, saves if self._costs.keeps_sums else None)
                self.checkpoints_s.append(self.now_s)

        self._schedule(self.now_s + upload_s, commit)
        return stall_s
