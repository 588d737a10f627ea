"""Process groups of one generation: raw, created under a store prefix, abandoned rather than destroyed.

Destroying a group that waits for a frozen peer blocks until the group's timeout, so the thread that must morph never
does it. A reaper thread shuts down the groups' sockets, which frees every thread that is blocked on them, and drops
the references.
"""

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from varuna.engine.base.transport import Group
from varuna.engine.links.authentication import prove
from varuna.engine.links.gpu_links import Direct
from varuna.process.threads import start

_kept: list["Groups"] = []


@dataclass
class Groups:
    """All groups that one rank needs in one generation."""

    world: Group
    """every member, spares too: activations, sums of tied gradients, state transfers"""
    grid: Group | None = None
    """the P*D ranks of the grid: votes, gradients of activations; None on a spare, and where one rank is the grid"""
    sums: dict[int, Group] = field(default_factory=dict)
    """by section of this rank: those that run it, by replica; one group for all sections that the same ranks run; none
    if D = 1"""
    direct: Direct = field(default_factory=Direct)
    """what goes from GPU to GPU"""
    _sockets: list[socket.socket] = field(default_factory=list)

    @property
    def gradients(self) -> Group:
        """By whose connections gradients of activations go: by other ones than activations.

        What asks a peer for the next gradient would wait there for all activations that were sent to it before: on a
        slow network the way back would be idle for half of the time.
        """
        assert self.grid is not None, "a pipeline of several stages has a grid of several ranks"
        return self.grid

    def abandon(self, *, exiting: bool = False) -> None:
        """Free every thread that is blocked on these groups, without waiting for any peer.

        ``exiting``: the process ends, and a reaper caught half-way by that would abort it.
        """
        _shut(self._sockets)
        if exiting:
            _kept.append(self)
            return
        self.direct.abandon()
        start("reaper", partial(_drop, [self]))


def _shut(connections: list[socket.socket]) -> None:
    """Free every thread that is blocked on them."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    connections.clear()


def _drop(abandoned: list[Groups]) -> None:
    """Drop groups on this thread, since their destructors may join threads."""
    for groups in abandoned:
        groups.grid = None
        groups.sums.clear()
        vars(groups).pop("world", None)


def _drop_kept() -> None:
    """Drop groups of earlier sessions of this process: each has threads that wake 100 times a second."""
    abandoned = list(_kept)
    del _kept[: len(abandoned)]
    for groups in abandoned:
        groups.direct.abandon()
    if abandoned:
        start("reaper", partial(_drop, abandoned))


def form(
    store: Any,
    *,
    generation: int,
    rank: int,
    members: int,
    grid: int,
    homes: Mapping[int, Sequence[int]],
    interface_host: str,
    secret: str = "",
) -> Groups:
    """Create the groups of a generation; blocks until every member does the same.

    Args:
        store: lives outside the workers; keys go under this generation's prefix.
        generation: number of the generation.
        rank: this member.
        members: all members, spares included.
        grid: P*D; ranks from here on are spares.
        homes: by section of this rank: the ranks that run it, by replica.
        interface_host: address of the private interface to bind to.
        secret: of the generation, by which members recognise each other; empty: they do not.

    Raises:
        RuntimeError: a member did not come, or has not proven that it belongs to the generation.
    """
    _drop_kept()
    own_sockets: list[socket.socket] = []

    def group(name: str, rank: int, size: int) -> Group:
        made = Group(store, f"g{generation}/{name}", rank, size, interface_host)
        own_sockets.extend(made.sockets())
        if secret and size > 1:
            prove(made, secret=secret, name=f"g{generation}/{name}", rank=rank)
        return made

    try:
        groups = Groups(group("world", rank, members), _sockets=own_sockets)
        if rank < grid and grid > 1:
            groups.grid = group("grid", rank, grid)
            made: dict[tuple[int, ...], Group] = {}
            for section, ranks in sorted(homes.items()):  # all ranks in this order: nobody waits for who waits for it
                holders = tuple(ranks)
                if len(holders) > 1:
                    if holders not in made:
                        made[holders] = group(f"section{section}", holders.index(rank), len(holders))
                    groups.sums[section] = made[holders]
    except BaseException:
        _shut(own_sockets)  # nobody else knows them
        raise
    return groups
