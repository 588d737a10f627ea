"""Groups of one generation: formed under a store prefix, and abandoned without asking any peer.

The thread that must morph never waits for one that is frozen: abandoning a group ends its transfers here, with an
error for each thread that waits for one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from varuna.core.times import Compressed
from varuna.engine.base.connection import SILENT_S
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group
from varuna.engine.links.authentication import prove
from varuna.engine.links.gpu_links import GpuLinks

_kept: list[GpuLinks] = []


@dataclass
class Groups:
    """The groups that one rank needs in one generation."""

    world: Group
    """every member, spares too: activations, sums of tied gradients, state transfers"""
    grid: Group | None = None
    """the P*D ranks of the grid: votes, gradients of activations; None on a spare, and where one rank is the grid"""
    sums: dict[int, Group] = field(default_factory=dict)
    """by section of this rank: those that run it, by replica; one group for all sections that the same ranks run; none
    if D = 1"""
    direct: GpuLinks = field(default_factory=GpuLinks)
    """links from GPU to GPU"""

    @property
    def gradients(self) -> Group:
        """Group by whose connections gradients of activations go: other ones than those of activations.

        A connection carries one message at a time: what asks a peer for the next gradient would wait for an activation
        that is on its way there, and on a slow network the way back would be idle meanwhile.
        """
        assert self.grid is not None, "a pipeline of several stages has a grid of several ranks"
        return self.grid

    @property
    def compressed(self) -> Compressed:
        """Bytes that this rank has sent compressed, before and after compression."""
        # One group may serve several sections, and counts once.
        distinct = {id(group): group for group in (self.world, self.grid, *self.sums.values()) if group is not None}
        return reduce(Compressed.plus, (each.compressed for each in distinct.values()), Compressed())

    def abandon(self, *, exiting: bool = False) -> None:
        """Free every thread that is blocked on these groups, without waiting for any peer.

        ``exiting``: the process ends, and a thread that aborts NCCL's communicators would be caught half-way by that.
        """
        for group in filter(None, (self.world, self.grid, *self.sums.values())):
            group.abandon()
        if exiting:
            _kept.append(self.direct)
        else:
            self.direct.abandon()


def form_groups(
    store: Any,
    *,
    generation: int,
    rank: int,
    members: int,
    grid: int,
    homes: Mapping[int, Sequence[int]],
    endpoint: Endpoint,
    secret: str = "",
    compresses: bool = False,
) -> Groups:
    """Create the groups of a generation; blocks until every member does the same.

    Args:
        store: lives outside the workers; keys go under this generation's prefix.
        generation: number of the generation.
        rank: this member.
        members: all members, spares included.
        grid: P*D; ranks from here on are spares.
        homes: by section of this rank: the ranks that run it, by replica.
        endpoint: how other members reach this one.
        secret: of the generation, by which members recognise each other; empty: they do not.
        compresses: what crosses a line that is waited for, where that is faster.

    Raises:
        RuntimeError: a member did not come, or has not proven that it belongs to the generation.
    """
    while _kept:
        _kept.pop().abandon()  # of an earlier session of this process, which has not ended after all
    own: list[Group] = []

    def group(name: str, rank: int, size: int, ranks: Sequence[int] | None = None) -> Group:
        made = Group(
            store,
            f"g{generation}/{name}",
            rank,
            size,
            endpoint,
            ranks=ranks,
            silent_s=SILENT_S if secret else None,
            compresses=compresses,
        )
        own.append(made)
        if secret and size > 1:
            prove(made, secret=secret, name=f"g{generation}/{name}", rank=rank)
        return made

    try:
        groups = Groups(group("world", rank, members))
        # World, grid, sums: in one order on all ranks, since each waits for all of its members.
        if rank < grid and grid > 1:
            groups.grid = group("grid", rank, grid)
            made: dict[tuple[int, ...], Group] = {}
            for section, ranks in sorted(homes.items()):  # one order on all ranks: no circle of waits
                holders = tuple(ranks)
                if len(holders) > 1:
                    if holders not in made:
                        made[holders] = group(f"section{section}", holders.index(rank), len(holders), holders)
                    groups.sums[section] = made[holders]
    except BaseException:
        for each in own:
            each.abandon()
        raise
    return groups
