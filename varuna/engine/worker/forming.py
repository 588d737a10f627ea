"""The beginning of a generation: groups, then state for every section of this rank, then a barrier.

All of it runs on a disposable thread, since every part of it may block on a peer that has just died.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from varuna.checkpoint.io.frozen import FrozenParameters, restore_frozen
from varuna.checkpoint.io.section_state import JSON, SectionState
from varuna.checkpoint.manifest import read_manifest
from varuna.checkpoint.names import split_place
from varuna.core.errors import DamagedCheckpoint, ModelError, VarunaError
from varuna.core.messages import Assignment
from varuna.core.sharded_optimizer import held_by, holders_of
from varuna.core.sums import SumLocation
from varuna.data.samples import SampleSource
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.spans import span
from varuna.engine.base.transport import FORMING_BOUND_S, Store, prefixed
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.device.capacity import rounding_kind
from varuna.engine.links.gpu_links import connect
from varuna.engine.links.groups import Groups, form_groups
from varuna.engine.stage.job import Job
from varuna.engine.stage.load_state import COPIED_SUMS, STATISTICS, SUMS
from varuna.engine.worker.agreement import check_agreement, share_refusal
from varuna.engine.worker.loop_state import LOOP, LoopState, LoopStateOffer, agree
from varuna.engine.worker.state_transfer import exchange_states, sums_copied
from varuna.engine.worker.stored import initial_states, stored_states, stored_sums
from varuna.partition.batch_weight import WeightFunction
from varuna.partition.model import PartitionedModel
from varuna.partition.watching.explaining import user_frame
from varuna.process.console import say
from varuna.store.opening import open_store

_POLL_S = 0.005


class WorkerContext(NamedTuple):
    """The context that all generations of a worker have in common."""

    job: Job
    source: SampleSource
    weight: WeightFunction | None
    """the user's weight of a micro-batch, if any"""
    steps: int
    """length of the run"""
    initial: Callable[[Sequence[str], bool], Mapping[str, Tensor]]
    """first values of named parameters, for a fresh start; checks the loss's weighing if told so"""
    connect: Callable[[Assignment], Any]
    """opens the store of an assignment"""
    endpoint: Endpoint
    """the addresses at which other ranks reach this process"""
    loop: LoopState
    """state of the training loop itself"""
    left_out: FrozenParameters | None = None
    """parameters that workers do not send each other, because files have them"""

    def first_values(self, names: Sequence[str], *, checks: bool = False) -> Mapping[str, Tensor]:
        """Make first values; the user's code builds the model here, and runs it on the first samples if this checks.

        Args:
            names: of parameters.
            checks: compare the job with plain PyTorch on the way.

        Raises:
            ModelError: the user's code raised an error that would pass for a broken link.
        """
        try:
            return self.initial(names, checks)
        except RuntimeError as error:
            place = f" at {where}" if (where := user_frame(error)) else ""
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"the model could not be built or run on the first samples{place}: {type(error).__name__}: "
                f"{first_line}. Try the same in plain PyTorch, in training mode, on a collated batch of dataset "
                "samples."
            ) from error


@dataclass(frozen=True)
class GenerationContext:
    """A generation that forms, as one of its members sees it."""

    worker: WorkerContext
    assignment: Assignment
    held: dict[int, SectionState]
    """state that this worker has, for itself and others"""
    told: LoopStateOffer
    """the state of its training loop"""
    combines: bool | None
    """the job's steps call ``all_reduce_shared``; None: unknown here"""
    ended: Callable[[], bool]
    """whether the generation is over"""
    at: Callable[[Awaited], None]
    """told of each part"""

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks of the other members."""
        return tuple(member for member in range(self.assignment.members) if member != self.assignment.rank)

    @property
    def sections(self) -> range:
        """Sections of this rank; none, if it is a spare."""
        return range(0) if self.assignment.is_spare else self.assignment.plan.sections_at(self.assignment.rank)

    def checked_values(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Make first values; rank 0 compares the job with plain PyTorch on the way."""
        return self.worker.first_values(names, checks=self.assignment.rank == 0)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Mark work of this generation, for a listener."""
        assignment = self.assignment
        stage = -1 if assignment.is_spare else assignment.plan.place_of(assignment.rank).stage
        return span(name, rank=assignment.rank, stage=stage, step=assignment.next_step, index=assignment.generation)


class GenerationResources(NamedTuple):
    """A generation that can run."""

    groups: Groups
    states: dict[int, SectionState]
    """state of this rank's sections; empty for a spare"""
    combines: bool | None
    """the job's steps call ``all_reduce_shared``; None if no member knows"""
    loop: JSON
    """state of the training loop; None: as in the beginning"""


class InterruptibleStore(Store):  # type: ignore[misc]
    """A store whose waits end when the generation does.

    Groups look for their peers' addresses with long waits inside C++; those end up here.
    """

    def __init__(self, inner: Any, ended: Callable[[], bool], bound_s: float = FORMING_BOUND_S) -> None:
        """Wait on ``inner``, for ``bound_s`` unless a call says otherwise."""
        super().__init__()
        self._inner = inner
        self._ended = ended
        self._bound = timedelta(seconds=bound_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Pass on."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        self.wait([key])
        value: bytes = self._inner.get(key)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Pass on."""
        found: bool = self._inner.check(list(keys))
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Poll, so that the end of the generation ends the wait.

        Raises:
            RuntimeError: the generation is over, or the time is.
        """
        deadline_s = time.monotonic() + (timeout or self._bound).total_seconds()
        while not self._inner.check(list(keys)):
            if self._ended() or time.monotonic() > deadline_s:
                raise RuntimeError(f"a member did not arrive (it has not set {', '.join(keys)})")
            time.sleep(_POLL_S)


def form_generation(context: GenerationContext, store: Any, made: list[Groups]) -> GenerationResources:
    """Bring this rank to the point where the first step can run; blocks until all members are there.

    Args:
        context: of the generation.
        store: of its members.
        made: gets groups as soon as they exist, for the thread that has to abandon them.

    Raises:
        RuntimeError: a peer is gone, or the generation was ended meanwhile.
        CheckpointError: a shard cannot be read.
        DamagedCheckpoint: a member found a shard damaged; all members raise this.
        ModelError: holders of a section begin with different parameters, or a member refuses the job.
    """
    assignment, told = context.assignment, context.told
    groups = _connected(context, InterruptibleStore(store, context.ended), made)
    states: dict[int, SectionState] = {}
    damage: DamagedCheckpoint | None = None
    try:
        states = _states(context, groups)
    except DamagedCheckpoint as error:
        damage = error
    context.at(Awaited("the end of forming", context.others))
    combines = context.combines
    # One exchange for all of it: it is the barrier, and tells the others what one member knows.
    known = torch.tensor([float(combines is True), float(combines is False), float(damage is not None)])
    if context.others:  # no rank drops old state before every rank has its own
        with context.span("barrier"):
            groups.world.all_reduce(known)
    if damage is not None or known[2]:
        # All members raise, after the barrier: the manager then chooses an older checkpoint for all.
        raise damage or DamagedCheckpoint(f"another rank found a damaged shard in {assignment.checkpoint}")
    loop: JSON = None
    if assignment.checkpoint is not None:
        _look_again(context, assignment.checkpoint, groups)
        loop = _stored_loop(assignment.checkpoint)
    elif not assignment.fresh:  # what workers have, of the newest step or of a memory checkpoint
        loop = agree(groups.world, assignment.rank, assignment.members, told) if context.others else told.value
    return GenerationResources(groups, states, True if known[0] else False if known[1] else None, loop)


def _connected(context: GenerationContext, store: InterruptibleStore, made: list[Groups]) -> Groups:
    """Connect all members, and GPUs with each other.

    Raises:
        RuntimeError: a peer is gone, or the generation was ended meanwhile.
    """
    assignment, job = context.assignment, context.worker.job
    plan, rank, traffic, endpoint = assignment.plan, assignment.rank, job.traffic, context.worker.endpoint
    context.at(Awaited("connections", context.others))
    groups = form_groups(
        store,
        generation=assignment.generation,
        rank=rank,
        members=assignment.members,
        grid=plan.workers,
        homes={section: plan.homes_of(section) for section in context.sections},
        endpoint=replace(endpoint, relays=assignment.relays),
        secret=assignment.secret,
        compresses=traffic.compresses,
    )
    made.append(groups)
    if context.ended():
        groups.abandon()  # the thread that ended it may have looked into ``made`` before
        raise RuntimeError("the generation ended while it formed")
    if (
        traffic.gpu_transport is not None
        and traffic.streams is not None
        and groups.grid is not None
        and plan.workers > 1
    ):
        traffic.gpu_transport.bind(endpoint.host)
        connect(
            groups.direct,
            traffic.gpu_transport,
            traffic.streams,
            plan=plan,
            rank=rank,
            group=groups.grid,
            store=prefixed(f"g{assignment.generation}/direct", store),
            sums=not job.bf16_reduction,
            ended=context.ended,
        )
    return groups


def _stored_loop(place: str) -> JSON:
    """Read the training loop's state in a checkpoint."""
    directory, step = split_place(place)
    first = read_manifest(open_store(directory), step).shards_of(0)[0]
    return cast(JSON, json.loads(first.scalars).get(LOOP))


def _states(context: GenerationContext, groups: Groups) -> dict[int, SectionState]:
    """Return the state of this rank's sections."""
    assignment, worker, held, wanted = context.assignment, context.worker, context.held, context.sections
    plan, rank, job = assignment.plan, assignment.rank, worker.job
    sources = {each.source_rank for each in assignment.transfers if each.target_rank == rank}
    targets = {each.target_rank for each in assignment.transfers if each.source_rank == rank}
    context.at(Awaited("the copying of sections", tuple(sorted(sources | targets))))
    received: dict[int, SectionState] = {}
    sums: dict[tuple[int, SumLocation], SectionState] = {}
    if assignment.transfers:
        with context.span("move"):
            received, sums = exchange_states(
                groups.world, assignment.transfers, rank, held, worker.left_out, job.dtype, job.traffic.state
            )
    if received:
        context.at(Awaited("frozen parameters from the files of weights="))
        restore_frozen(received, _used(job.model, received), worker.first_values, "what another worker sent")
    states: dict[int, SectionState] = {}
    refusal: VarunaError | None = None
    what = f"first values of {len(wanted)} sections" if assignment.fresh else "state from the checkpoint"
    context.at(Awaited(what, checks=assignment.fresh))
    if assignment.fresh:
        try:
            states = initial_states(job.model, wanted, context.checked_values, job.buffers) if wanted else {}
        except VarunaError as error:
            refusal = error
    elif assignment.checkpoint is not None:
        holders = holders_of(plan, job.model.facts.sections, shared=job.memory.shard_optimizer)
        # Of lent sections only what they compute with is read: other replicas have their optimizer state.
        lent = set(wanted) - set(held_by(holders, wanted, plan.place_of(rank).replica))
        states = stored_states(job.model, wanted, assignment.checkpoint, lent=lent, initial=worker.first_values)
        _add_sums(context, states, {}, stored_sums(job.model, states, assignment, job.dtype))
    else:
        states = {section: received[section] if section in received else held[section] for section in wanted}
        restore_frozen(states, _used(job.model, states), worker.first_values, "the copy of a lost worker's state")
        _add_sums(context, states, held, sums)
    if context.others and assignment.fresh:
        context.at(Awaited("the comparison of first values", context.others, checks=True))
        share_refusal(groups.world, rank, assignment.members, refusal)
        if check_agreement(groups.world, job.model, plan, rank, states, rounding_kind(job.device)) and rank == 0:
            say("processors of several kinds round first values differently: all workers start from the same ones")
    elif refusal is not None:
        raise refusal
    return states


def _used(model: PartitionedModel, states: Collection[int]) -> dict[int, Sequence[str]]:
    """Return names of parameters, by section."""
    return {section: model.sections[section].parameters for section in states}


def _add_sums(
    context: GenerationContext,
    states: Mapping[int, SectionState],
    held: Mapping[int, SectionState],
    arrived: Mapping[tuple[int, SumLocation], SectionState],
) -> None:
    """Put the sums of gradients that this rank resumes from into the states: one that is here, or a new total.

    They are on the job's device.

    None, if what is in them is not what the manager was told: the vote then shows it, and the step runs again. Never in
    place: until all members are ready, what is here must remain what this worker has said that it is.
    """
    assignment, device = context.assignment, context.worker.job.device
    parts: dict[int, list[SectionState | None]] = {}
    for each in assignment.rest.taken if assignment.rest is not None else ():
        if each.source_rank != assignment.rank:
            state = arrived.get((each.section, SumLocation(each.source_rank, each.copied)))
        elif each.file:
            state = arrived.get((each.section, SumLocation(each.source_rank, file=each.file)))
        else:
            state = held.get(each.section)
            if each.copied and state is not None:
                state = sums_copied(state)
        is_it = state is not None and state.scalars.get(SUMS) == [list(span) for span in each.micro_batches]
        parts.setdefault(each.section, []).append(state if is_it else None)
    for section, state in states.items():
        # Copies of the dict, not of tensors: entries are popped from states, which the parts may be.
        known = [part.tensors.copy() for part in parts.get(section, ()) if part is not None]
        for name in (SUMS, COPIED_SUMS, STATISTICS):
            state.tensors.pop(name, None)
            state.scalars.pop(name, None)
        if known and len(known) == len(parts[section]):  # else there are none, and the vote shows it
            sums = [part[SUMS].to(device) for part in known]
            # In the order of ``taken``, which the manager decided: the bits do not depend on what arrives first.
            state.tensors[SUMS] = sum(sums[1:], sums[0])  # no copy, if there is one
            if STATISTICS in known[0]:
                state.tensors[STATISTICS] = torch.cat([part[STATISTICS] for part in known])


def _look_again(context: GenerationContext, place: str, groups: Groups) -> None:
    """Let rank 0 check the model as before step 0, if other code than this wrote the checkpoint.

    Raises:
        ModelError: it would train another model than plain PyTorch; every rank raises it.
    """
    rank, members = context.assignment.rank, context.assignment.members
    refusal: VarunaError | None = None
    if rank == 0:
        directory, step = split_place(place)
        if read_manifest(open_store(directory), step).code_digest != context.worker.job.model.facts.code_digest:
            say(f"the checkpoint of step {step} was written by other code or versions: the model is checked anew")
            context.at(Awaited("the check of the model"))
            try:
                context.checked_values(())
            except VarunaError as error:
                refusal = error
    if members > 1:
        context.at(Awaited("the check of the model", (0,) if rank else context.others))
        share_refusal(groups.world, rank, members, refusal)
    elif refusal is not None:
        raise refusal
