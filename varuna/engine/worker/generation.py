"""One rank's part in one generation: its groups, stage, links and reductions, from forming to the end.

make_generation   thread "forming": store, connections, state of this rank's sections, barrier (``forming``)
                  training thread: waits for it in the inbox, so the end of the generation ends it
build_stage       the stage over these states, with the sums of a step that was broken off
send_rest         threads: optimizer state that other ranks need before their first update
open_generation   threads: links, loader, reductions, what follows to this rank, copies to and from others
steps             ``worker.step``, again and again
close             the inbox first, so that every wait ends; then what threads feed on; the groups last
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.messages import Assignment
from varuna.core.plan import Copies, Plan
from varuna.core.times import Interval
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.peer_activity import watch_peers
from varuna.engine.base.spans import span
from varuna.engine.base.wait_bounds import Awaited, Doing
from varuna.engine.copies.following import StateReceiver, StateSender, received_later, sent_later
from varuna.engine.copies.keeping import CopyKeeper, KeptSums
from varuna.engine.copies.memory_checkpoints import CheckpointMaker, MemoryCheckpoints
from varuna.engine.copies.sending import CopiedStage, CopySender
from varuna.engine.device.host_copies import Ready
from varuna.engine.links.groups import Groups
from varuna.engine.links.links import Courier
from varuna.engine.pipeline.reduce import Reducer
from varuna.engine.pipeline.replicas import ReplicaComparison
from varuna.engine.pipeline.runtime import Runtime
from varuna.engine.stage.load_state import STATISTICS, SUMS, rest_of
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.sums import ResumedStep
from varuna.engine.worker.forming import GenerationContext, GenerationResources, WorkerContext, form_generation
from varuna.engine.worker.loop_state import LoopStateOffer
from varuna.schedule.copy_pace import checkpoint_every_s


@dataclass
class Generation:
    """The parts that this rank runs in one generation."""

    assignment: Assignment
    inbox: Inbox
    groups: Groups
    stage: Stage
    reducer: Reducer
    runtime: Runtime
    receiver: StateReceiver
    """of optimizer state that is still to come"""
    checkpoints: CheckpointMaker | None
    """in memory, if they are made"""

    @property
    def plan(self) -> Plan:
        """P, D, m and who does what."""
        return self.assignment.plan

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to."""
        return self.plan.place_of(self.assignment.rank).replica

    @property
    def is_as_it_began(self) -> bool:
        """Whether its state is still that of a checkpoint, or of the beginning of the run."""
        begins = self.assignment.fresh or self.assignment.checkpoint is not None
        return begins and self.stage.next_step == self.assignment.next_step

    @cached_property
    def comparison(self) -> ReplicaComparison:
        """Compares replicas."""
        return ReplicaComparison(self.stage, self.reducer, self.assignment.rank)

    @cached_property
    def reports_lr(self) -> bool:
        """Whether this rank says the learning rate in votes: the first whose optimizer has parameters."""
        model = self.stage.job.model
        trained = (s.index for s in model.sections if not model.trainable.isdisjoint(s.parameters))
        # One rank writes the slot of the vote: the first holder of the first section that is trained.
        first = next(trained, 0)
        return self.assignment.rank == self.plan.home_of(self.stage.sharding.holders[first][0], first)

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Note the time of what follows the actions of a step, in this block."""
        begin_s = time.monotonic()
        with span(name, rank=self.assignment.rank, stage=self.stage.index, step=step):
            yield
        self.runtime.phases.append(Interval(name, -1, begin_s, time.monotonic()))

    def wait_until_whole(self) -> None:
        """Wait for optimizer state that is still to come.

        Raises:
            LinkError: its source is gone.
            GenerationEnded: the manager ended the generation.
        """
        if not self.receiver.is_over:
            with self.phase("rest of state", self.stage.next_step):
                self.receiver.wait()

    def span(self, name: str, index: int) -> AbstractContextManager[None]:
        """Mark work between two steps, for a listener."""
        return span(name, rank=self.assignment.rank, stage=self.stage.index, step=self.stage.next_step - 1, index=index)

    def close(self, *, exiting: bool = False) -> None:
        """Abandon the generation without waiting for anyone."""
        self.inbox.abort(GenerationEnded(self.assignment.generation))
        self.receiver.close()
        self.stage.still.close()
        if self.checkpoints is not None:
            self.checkpoints.close()
            self.checkpoints = None
        self.runtime.close()
        self.reducer.close()
        self.groups.abandon(exiting=exiting)


def make_generation(
    context: WorkerContext,
    assignment: Assignment,
    inbox: Inbox,
    held: dict[int, SectionState],
    told: LoopStateOffer,
    combines: bool | None,
    doing: Callable[[int], Doing],
    give_up: Callable[[str], None],
) -> GenerationResources:
    """Make groups and get the state of this rank's sections; blocks until all members are there, or the inbox aborts.

    Args:
        context: of the worker.
        assignment: its part.
        inbox: of the generation.
        held: state that this worker has, for itself and others.
        told: the state of its training loop.
        combines: whether the job's steps call ``all_reduce_shared``; None: unknown here.
        doing: what this rank does, for the others: see ``base.peer_activity``.
        give_up: ends this rank.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a member is gone.
        CheckpointError: a shard cannot be read or is damaged.
        ModelError: holders of a section begin with different parameters.
    """
    courier = Courier(inbox, f"forming generation {assignment.generation}")
    made: list[Groups] = []
    parts = [Awaited("the store of the generation")]
    forming = GenerationContext(context, assignment, held, told, combines, lambda: inbox.ended, parts.append)

    def work() -> GenerationResources:
        store, grid = context.connect(assignment), range(assignment.plan.workers)
        # Before groups are formed: a wait for a member that is late can say what that one does.
        if len(grid) > 1:
            watch_peers(inbox, store, assignment.generation, assignment.rank, grid, doing, give_up)
        return form_generation(forming, store, made)

    stage = assignment.plan.place_of(assignment.rank).stage
    with span("form", rank=assignment.rank, stage=stage, step=assignment.next_step, index=assignment.generation):
        courier.submit("formed", work)
        courier.close()
        try:
            formed: GenerationResources = inbox.take("formed", lambda: parts[-1])
        except BaseException:
            inbox.abort(GenerationEnded(assignment.generation))  # first: the courier may be about to make groups
            for groups in made:  # frees a courier that waits for a frozen peer
                groups.abandon()
            raise
    if assignment.fresh:
        # The training loop goes with the model: back to its beginning, to the checkpoint's, or to the farthest
        # worker's.
        context.loop.restart()
    elif not assignment.goes_on:
        context.loop.resume(formed.loop, assignment.next_step)
    else:
        context.loop.take_state(formed.loop, assignment.next_step)
    return formed


def build_stage(context: WorkerContext, assignment: Assignment, states: Mapping[int, SectionState]) -> Stage:
    """Build this rank's stage with its state, and with the sums of gradients that it resumes from."""
    plan, rest, begun = assignment.plan, assignment.rest, None
    place = plan.place_of(assignment.rank)
    if rest is not None:
        begun = ResumedStep(
            rest,
            {section: state.tensors[SUMS] for section, state in states.items() if SUMS in state.tensors},
            {each: state.tensors[STATISTICS] for each, state in states.items() if STATISTICS in state.tensors},
        )
    missing = frozenset(each.section for each in received_later(assignment))
    return Stage(
        context.job,
        plan,
        place.stage,
        states,
        assignment.next_step,
        replica=place.replica,
        begun=begun,
        missing=missing,
        steering=context.loop.steering,
    )


def send_rest(
    assignment: Assignment,
    groups: Groups,
    kept: Mapping[int, SectionState],
    dtype: torch.dtype,
    then: Callable[[], object],
) -> None:
    """Begin to send what follows from this rank out of what it has ``kept``; ``then`` is called once that is done."""
    moves = sent_later(assignment)
    if not moves:
        then()
        return
    stage = -1 if assignment.is_spare else assignment.plan.place_of(assignment.rank).stage
    parts = {each.section: rest_of(kept[each.section], dtype) for each in moves}
    StateSender(groups.world, moves, parts, then=then, step=assignment.next_step, stage=stage)


def open_generation(
    context: WorkerContext,
    assignment: Assignment,
    inbox: Inbox,
    groups: Groups,
    stage: Stage,
    sums: KeptSums,
    memory: MemoryCheckpoints,
) -> Generation:
    """Open links, loader and reductions of a formed generation, and begin to copy its state to other ranks."""
    plan, rank = assignment.plan, assignment.rank
    reducer = Reducer(stage, plan, rank, groups, inbox)
    runtime = Runtime(
        stage,
        plan,
        rank,
        groups=groups,
        inbox=inbox,
        reducer=reducer,
        source=context.source,
        weight=context.weight,
        steps=context.steps,
    )
    receiver = StateReceiver(
        groups.world,
        received_later(assignment),
        stage.complete,
        inbox=inbox,
        step=assignment.next_step,
        stage=stage.index,
    )
    checkpoints = None
    if plan.copies is Copies.STATE:
        checkpoints = _checkpoint_maker(context, assignment, inbox, stage, memory)
    where = {"rank": rank, "stage": stage.index}
    if assignment.copy_from is not None:
        CopyKeeper(
            groups.world,
            assignment.copy_from,
            memory,
            sums,
            generation=assignment.generation,
            inbox=inbox,
            still=stage.still,
            **where,
        )
    if assignment.copy_to is not None:
        # Statistics would have to be copied, too; without them a copy of the sums could not be resumed from.
        summed = stage if stage.sums.outlast and not stage.statistics.sections else None
        copied = CopiedStage(stage.still, checkpoints, summed)
        CopySender(groups.world, assignment.copy_to, copied, inbox=inbox, steps=context.steps, **where)
    return Generation(assignment, inbox, groups, stage, reducer, runtime, receiver, checkpoints)


def _checkpoint_maker(
    context: WorkerContext, assignment: Assignment, inbox: Inbox, stage: Stage, memory: MemoryCheckpoints
) -> CheckpointMaker:
    def delay(copied: Ready) -> None:
        stage.copied = copied

    sizes = [section.parameter_bytes + section.optimizer_bytes for section in context.job.model.facts.sections]
    plan = assignment.plan
    # Of the plan's largest stage: rank 0 decides for all when the next checkpoint is made.
    largest_bytes = max(sum(sizes[section] for section in slot.sections) for slot in plan.slots)
    return CheckpointMaker(
        memory,
        generation=assignment.generation,
        ranks=plan.workers,
        first_step=assignment.next_step,
        states=partial(_states_of, context, stage),
        still=stage.still,
        copies=context.job.traffic.saves,
        delay=delay,
        every_s=lambda stall_s: checkpoint_every_s(
            largest_bytes,
            stall_s,
            on_device=context.job.device.type != "cpu",
            losses_per_hour=assignment.losses_per_hour,
        ),
        inbox=inbox,
        rank=assignment.rank,
        stage=stage.index,
    )


def _states_of(context: WorkerContext, stage: Stage) -> dict[int, SectionState]:
    """Return the state of all sections of a stage, as references; without what files have."""
    found = {section: stage.state_of(section) for section in stage.sections}
    return found if context.left_out is None else {each: context.left_out.of(found[each]) for each in found}


def who(assignment: Assignment) -> str:
    """Name a rank, in words."""
    rank, plan = assignment.rank, assignment.plan
    return f"rank {rank} (a spare)" if assignment.is_spare else f"rank {rank} (stage {plan.place_of(rank).stage})"
