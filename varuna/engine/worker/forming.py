"""The beginning of a generation: groups, then state for every section of this rank, then a barrier.

All of it runs on a disposable thread, since every part of it may block on a peer that has just died.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from varuna.checkpoint.io.frozen import FrozenParameters, put_back
from varuna.checkpoint.io.section_state import JSON, SectionState
from varuna.checkpoint.manifest import read_manifest
from varuna.checkpoint.names import split_place
from varuna.core.errors import DamagedCheckpoint, VarunaError
from varuna.core.messages import Assignment
from varuna.core.sharded_optimizer import held_by, holders_of
from varuna.core.sums import SumLocation
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.spans import span
from varuna.engine.base.transport import FORMING_BOUND_S, Store, prefixed
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.links.gpu_links import connect
from varuna.engine.links.groups import Groups, form
from varuna.engine.links.traffic import TransferPaths
from varuna.engine.stage.load_state import COPIED_SUMS, STATISTICS, SUMS
from varuna.engine.worker.agreement import check_agreement, share_refusal
from varuna.engine.worker.loop_state import LOOP, Told, agree
from varuna.engine.worker.state_transfer import exchange, sums_copied
from varuna.engine.worker.stored import initial_states, stored_states, stored_sums
from varuna.partition.model import PartitionedModel
from varuna.process.console import say
from varuna.store.opening import open_store

_POLL_S = 0.005


class FirstValues(Protocol):
    """First values of parameters."""

    def __call__(self, names: Sequence[str], *, checks: bool) -> Mapping[str, Tensor]:
        """Of those with these ``names``; ``checks``: rank 0 compares the job with plain PyTorch on the way."""


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


def form_generation(
    assignment: Assignment,
    *,
    store: Any,
    ended: Callable[[], bool],
    held: dict[int, SectionState],
    told: Told,
    model: PartitionedModel,
    initial: FirstValues,
    left_out: FrozenParameters | None,
    buffers: Mapping[str, Tensor],
    combines: bool | None,
    shard_optimizer: bool,
    bf16_reduction: bool,
    dtype: torch.dtype,
    device: torch.device,
    traffic: TransferPaths,
    endpoint: Endpoint,
    made: list[Groups],
    at: Callable[[Awaited], None],
) -> GenerationResources:
    """Bring this rank to the point where the first step can run; blocks until all members are there.

    Groups are put into ``made`` as soon as they exist, for whoever has to abandon them; ``at`` is told of each part.

    Raises:
        RuntimeError: a peer is gone, or the generation was ended meanwhile.
        CheckpointError: a shard cannot be read.
        DamagedCheckpoint: a member found a shard damaged; all members raise this.
        ModelError: holders of a section begin with different parameters, or a member refuses the job.
    """
    plan, rank = assignment.plan, assignment.rank
    sections = range(0) if assignment.is_spare else plan.sections_at(rank)
    others = tuple(member for member in range(assignment.members) if member != rank)
    interruptible = InterruptibleStore(store, ended)
    at(Awaited("connections", others))
    groups = form(
        interruptible,
        generation=assignment.generation,
        rank=rank,
        members=assignment.members,
        grid=plan.workers,
        homes={section: plan.homes_of(section) for section in sections},
        endpoint=replace(endpoint, relays=assignment.relays),
        secret=assignment.secret,
        compresses=traffic.compresses,
    )
    made.append(groups)
    if ended():
        groups.abandon()  # whoever ended it may have looked into ``made`` before
        raise RuntimeError("the generation ended while it formed")
    if traffic.fabric is not None and traffic.streams is not None and groups.grid is not None and plan.workers > 1:
        traffic.fabric.bind(endpoint.host)
        connect(
            groups.direct,
            traffic.fabric,
            traffic.streams,
            plan=plan,
            rank=rank,
            group=groups.grid,
            store=prefixed(f"g{assignment.generation}/direct", interruptible),
            sums=not bf16_reduction,
            ended=ended,
        )
    states: dict[int, SectionState] = {}
    damage: DamagedCheckpoint | None = None
    try:
        states = _states(
            assignment,
            groups,
            held,
            model,
            initial,
            left_out,
            buffers,
            shard_optimizer=shard_optimizer,
            dtype=dtype,
            device=device,
            copies=traffic.state,
            at=at,
        )
    except DamagedCheckpoint as error:
        damage = error
    at(Awaited("the end of forming", others))
    known = torch.tensor([float(combines is True), float(combines is False), float(damage is not None)])
    if assignment.members > 1:  # nobody drops old state before everyone has its own
        with _span("barrier", assignment):
            groups.world.all_reduce(known)
    if damage is not None or known[2]:
        raise damage or DamagedCheckpoint(f"another rank found a damaged shard in {assignment.checkpoint}")
    if assignment.checkpoint is not None:
        _look_again(assignment, assignment.checkpoint, groups, model, initial, at=at)
    loop: JSON = None
    if assignment.checkpoint is not None:
        loop = _stored_loop(assignment.checkpoint)
    elif not assignment.fresh:  # what workers have, of the newest step or of a memory checkpoint
        loop = agree(groups.world, rank, assignment.members, told) if assignment.members > 1 else told.value
    return GenerationResources(groups, states, True if known[0] else False if known[1] else None, loop)


def _span(name: str, assignment: Assignment) -> AbstractContextManager[None]:
    stage = -1 if assignment.is_spare else assignment.plan.place_of(assignment.rank).stage
    return span(name, rank=assignment.rank, stage=stage, step=assignment.next_step, index=assignment.generation)


def _stored_loop(place: str) -> JSON:
    """The training loop's state in a checkpoint."""
    directory, step = split_place(place)
    first = read_manifest(open_store(directory), step).shards_of(0)[0]
    return cast(JSON, json.loads(first.scalars).get(LOOP))


def _states(
    assignment: Assignment,
    groups: Groups,
    held: dict[int, SectionState],
    model: PartitionedModel,
    initial: FirstValues,
    left_out: FrozenParameters | None,
    buffers: Mapping[str, Tensor],
    *,
    shard_optimizer: bool,
    dtype: torch.dtype,
    device: torch.device,
    copies: HostCopies,
    at: Callable[[Awaited], None],
) -> dict[int, SectionState]:
    """State of this rank's sections."""
    plan, rank = assignment.plan, assignment.rank
    replica = plan.place_of(rank).replica
    wanted = range(0) if assignment.is_spare else plan.sections_at(rank)
    sources = {each.source_rank for each in assignment.transfers if each.target_rank == rank}
    targets = {each.target_rank for each in assignment.transfers if each.source_rank == rank}
    at(Awaited("the copying of sections", tuple(sorted(sources | targets))))
    received: dict[int, SectionState] = {}
    sums: dict[tuple[int, SumLocation], SectionState] = {}
    if assignment.transfers:
        with _span("move", assignment):
            received, sums = exchange(groups.world, assignment.transfers, rank, held, left_out, dtype, copies)
    if received:
        at(Awaited("frozen parameters from the files of weights="))
        put_back(received, _used(model, received), partial(initial, checks=False), "what another worker sent")
    states: dict[int, SectionState] = {}
    refusal: VarunaError | None = None
    what = f"first values of {len(wanted)} sections" if assignment.fresh else "state from the checkpoint"
    at(Awaited(what, checks=assignment.fresh))
    if assignment.fresh:
        try:
            states = initial_states(model, wanted, partial(initial, checks=True), buffers) if wanted else {}
        except VarunaError as error:
            refusal = error
    elif assignment.checkpoint is not None:
        whole = held_by(holders_of(plan, model.facts.sections, shared=shard_optimizer), wanted, replica)
        frozen = partial(initial, checks=False)
        states = stored_states(model, wanted, assignment.checkpoint, lent=set(wanted) - set(whole), initial=frozen)
        _add_sums(states, assignment, {}, stored_sums(model, states, assignment, dtype), device)
    else:
        states = {section: received[section] if section in received else held[section] for section in wanted}
        put_back(states, _used(model, states), partial(initial, checks=False), "the copy of a lost worker's state")
        _add_sums(states, assignment, held, sums, device)
    if assignment.members > 1 and assignment.fresh:
        others = tuple(m for m in range(assignment.members) if m != rank)
        at(Awaited("the comparison of first values", others, checks=True))
        share_refusal(groups.world, rank, assignment.members, refusal)
        check_agreement(groups.world, model, plan, rank, states)
    elif refusal is not None:
        raise refusal
    return states


def _used(model: PartitionedModel, states: Collection[int]) -> dict[int, Sequence[str]]:
    """Parameters of sections."""
    return {section: model.sections[section].parameters for section in states}


def _add_sums(
    states: Mapping[int, SectionState],
    assignment: Assignment,
    held: Mapping[int, SectionState],
    arrived: Mapping[tuple[int, SumLocation], SectionState],
    device: torch.device,
) -> None:
    """Put the sums of gradients that this rank goes on from into the states: one that is here as it is, or a new total.
    They are on the ``device``.

    None, if what is in them is not what the manager was told: the vote then shows it, and the step runs again. Never in
    place: until all members are ready, what is here must remain what this worker has said that it is.
    """
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
        known = [part.tensors.copy() for part in parts.get(section, ()) if part is not None]
        for name in (SUMS, COPIED_SUMS, STATISTICS):
            state.tensors.pop(name, None)
            state.scalars.pop(name, None)
        if known and len(known) == len(parts[section]):  # else there are none, and the vote shows it
            sums = [part[SUMS].to(device) for part in known]
            state.tensors[SUMS] = sum(sums[1:], sums[0])  # no copy, if there is one
            if STATISTICS in known[0]:
                state.tensors[STATISTICS] = torch.cat([part[STATISTICS] for part in known])


def _look_again(
    assignment: Assignment,
    place: str,
    groups: Groups,
    model: PartitionedModel,
    initial: FirstValues,
    *,
    at: Callable[[Awaited], None],
) -> None:
    """Let rank 0 check the model as before step 0, if other code than this wrote the checkpoint.

    Raises:
        ModelError: it would train another model than plain PyTorch; every rank raises it.
    """
    rank, members = assignment.rank, assignment.members
    refusal: VarunaError | None = None
    if rank == 0:
        directory, step = split_place(place)
        if read_manifest(open_store(directory), step).code_digest != model.facts.code_digest:
            say(f"the checkpoint of step {step} was written by other code or versions: the model is checked anew")
            at(Awaited("the check of the model"))
            try:
                initial((), checks=True)
            except VarunaError as error:
                refusal = error
    if members > 1:
        at(Awaited("the check of the model", (0,) if rank else tuple(range(1, members))))
        share_refusal(groups.world, rank, members, refusal)
    elif refusal is not None:
        raise refusal
