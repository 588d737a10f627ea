"""How a generation begins: groups, then state for every section of this rank, then a barrier.

All of it runs on a disposable thread, since every part of it may block on a peer that has just died.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.manifest import read_manifest
from varuna.checkpoint.shards import SectionState, read_shard
from varuna.core.messages import Assignment
from varuna.engine.agreement import check_agreement
from varuna.engine.groups import Groups, form
from varuna.engine.transfer import exchange
from varuna.engine.transport import Store
from varuna.partition.model import PartitionedModel

_POLL_S = 0.005


class Formed(NamedTuple):
    """A generation that can run."""

    groups: Groups
    states: dict[int, SectionState]
    """state of this rank's sections; empty for a spare"""
    shares: bool | None
    """the job's steps call ``all_reduce_shared``; None if no member knows"""


class InterruptibleStore(Store):  # type: ignore[misc]
    """A store whose waits end when the generation does.

    Groups look for their peers' addresses with long waits inside C++; those end up here.
    """

    def __init__(self, inner: Any, ended: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._ended = ended

    def set(self, key: str, value: bytes | str) -> None:
        """Pass on."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        self.wait([key], timedelta(minutes=30))
        value: bytes = self._inner.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Pass on."""
        total: int = self._inner.add(key, amount)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Pass on."""
        found: bool = self._inner.check(list(keys))
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(minutes=30)) -> None:
        """Poll, so that the end of the generation ends the wait.

        Raises:
            RuntimeError: the generation is over, or the time is.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self._inner.check(list(keys)):
            if self._ended() or time.monotonic() > deadline_s:
                raise RuntimeError(f"a member did not come (it has not set {', '.join(keys)})")
            time.sleep(_POLL_S)


def form_generation(
    assignment: Assignment,
    *,
    store: Any,
    ended: Callable[[], bool],
    held: dict[int, SectionState],
    model: PartitionedModel,
    initial: Callable[[Sequence[str]], Mapping[str, Tensor]],
    shares: bool | None,
    interface_host: str,
    made: list[Groups],
) -> Formed:
    """Bring this rank to the point where the first step can run; blocks until all members are there.

    Groups are put into ``made`` as soon as they exist, for whoever has to abandon them.

    Raises:
        RuntimeError: a peer is gone, or the generation was ended meanwhile.
        CheckpointError: a shard cannot be read or is damaged.
        ModelError: holders of a section begin with different parameters.
    """
    plan, rank = assignment.plan, assignment.rank
    stage = None if assignment.is_spare else plan.place_of(rank).stage
    peers = range(0) if stage is None else range(stage, plan.workers, plan.stages)
    groups = form(
        InterruptibleStore(store, ended),
        generation=assignment.generation,
        rank=rank,
        members=len(assignment.members),
        grid=plan.workers,
        peers=peers,
        interface_host=interface_host,
        store_port=assignment.store_port,
    )
    made.append(groups)
    if ended():
        raise RuntimeError("the generation ended while it formed")
    states = _states(assignment, groups, held, model, initial)
    known = torch.tensor([float(shares is True), float(shares is False)])
    if len(assignment.members) > 1:  # nobody drops old state before everyone has its own
        groups.world.all_reduce(known)
    return Formed(groups, states, True if known[0] else False if known[1] else None)


def _states(
    assignment: Assignment,
    groups: Groups,
    held: dict[int, SectionState],
    model: PartitionedModel,
    initial: Callable[[Sequence[str]], Mapping[str, Tensor]],
) -> dict[int, SectionState]:
    """State of this rank's sections."""
    plan, rank = assignment.plan, assignment.rank
    wanted = () if assignment.is_spare else plan.sections_of(plan.place_of(rank).stage)
    received = exchange(groups.world, assignment.transfers, rank, held) if assignment.transfers else {}
    states: dict[int, SectionState] = {}
    if assignment.fresh:
        states = initial_states(model, wanted, initial) if wanted else {}
    elif assignment.checkpoint is not None:
        states = stored_states(model, wanted, Path(assignment.checkpoint))
    else:
        states = {section: received[section] if section in received else held[section] for section in wanted}
    if len(assignment.members) > 1 and assignment.fresh:
        check_agreement(groups.world, model, plan, rank, states)
    return states


def initial_states(
    model: PartitionedModel, sections: Sequence[int], initial: Callable[[Sequence[str]], Mapping[str, Tensor]]
) -> dict[int, SectionState]:
    """State of ``sections`` at step 0: parameters only."""
    used = {section: dict.fromkeys(model.sections[section].parameters) for section in sections}
    values = initial(list(dict.fromkeys(name for names in used.values() for name in names)))
    return {
        section: SectionState(section, {f"parameters/{name}": values[name] for name in names})
        for section, names in used.items()
    }


def stored_states(model: PartitionedModel, sections: Sequence[int], folder: Path) -> dict[int, SectionState]:
    """State of ``sections`` from a checkpoint; tied parameters come from their owner's shard."""
    manifest = read_manifest(folder)
    shards = {section: read_shard(folder.parent, manifest.shards[section]) for section in sections}
    for tied in model.facts.tied:
        users = [section for section in tied.sections if section in shards and section != tied.owner]
        if not users:
            continue
        owner = shards[tied.owner] if tied.owner in shards else read_shard(folder.parent, manifest.shards[tied.owner])
        prefixes = (f"parameters/{tied.name}", f"optimizer/{tied.name}/")
        for section in users:
            shards[section].tensors.update({k: v for k, v in owner.tensors.items() if k.startswith(prefixes)})
            shards[section].scalars.update({k: v for k, v in owner.scalars.items() if k.startswith(prefixes)})
    return shards
