"""Process groups of one generation: raw, created under a store prefix, abandoned rather than destroyed.

Destroying a group that waits for a frozen peer blocks until the group's timeout, so the thread that must morph never
does it. A reaper thread shuts down the groups' sockets, which frees every thread that is blocked on them, and drops
the references.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from varuna.engine.base.transport import Group
from varuna.engine.links.authentication import prove
from varuna.engine.links.gpu_links import Direct
from varuna.process.threads import start

_kept: list["Groups"] = []
_counting = threading.Lock()
_entered, _inside = [0], [0]  # sockets are found by comparing descriptors before and after a group is made


@dataclass
class Groups:
    """All groups that one rank needs in one generation."""

    world: Group
    """every member, spares too: activations, gradients, state transfers"""
    vote: Group | None = None
    """the P*D ranks of the grid; None on a spare, and where one rank is the grid"""
    stage: Group | None = None
    """the D replicas of this stage, by replica; None if D = 1"""
    direct: Direct = field(default_factory=Direct)
    """what goes from GPU to GPU"""
    _sockets: list[socket.socket] = field(default_factory=list)

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
        groups.vote = groups.stage = None
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
    peers: range,
    interface_host: str,
    store_port: int,
    secret: str = "",
) -> Groups:
    """Create the groups of a generation; blocks until every member does the same.

    Args:
        store: lives outside the workers; keys go under this generation's prefix.
        generation: number of the generation.
        rank: this member.
        members: all members, spares included.
        grid: P*D; ranks from here on are spares.
        peers: ranks of this rank's stage, by replica.
        interface_host: address of the private interface to bind to.
        store_port: port of the store, whose connections are not the groups'.
        secret: of the generation, by which members recognise each other; empty: they do not.

    Raises:
        RuntimeError: a member did not come, or has not proven that it belongs to the generation.
    """
    _drop_kept()

    def group(name: str, rank: int, size: int) -> Group:
        made = Group(store, f"g{generation}/{name}", rank, size, interface_host)
        if secret and size > 1:
            prove(made, secret=secret, name=f"g{generation}/{name}", rank=rank)
        return made

    own_sockets: list[socket.socket] = []
    try:
        with _watched(store_port) as own_sockets:
            groups = Groups(group("world", rank, members))
            if rank < grid and grid > 1:
                groups.vote = group("vote", rank, grid)
                if len(peers) > 1:
                    groups.stage = group(f"stage{peers.start}", peers.index(rank), len(peers))
    except BaseException:
        _shut(own_sockets)  # nobody else knows them
        raise
    groups._sockets = own_sockets
    return groups


@contextlib.contextmanager
def _watched(store_port: int) -> Iterator[list[socket.socket]]:
    """Collect the peer sockets that the block opens; none if another block ran meanwhile: whose would they be?

    Sockets are told apart by inode: a number that was closed and taken again is another socket.
    """
    found: list[socket.socket] = []
    with _counting:
        _entered[0] += 1
        ticket, before = _entered[0], _open_sockets()
        _inside[0] += 1
    try:
        yield found
    finally:
        with _counting:
            _inside[0] -= 1
            alone = _entered[0] == ticket and _inside[0] == 0
            after = _open_sockets() if alone else {}
            for inode in after.keys() - before.keys():
                if (connection := _peer_socket(after[inode], inode, store_port)) is not None:
                    found.append(connection)


def _open_sockets() -> dict[int, int]:
    """Descriptor by inode of each socket of this process."""
    sockets = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except FileNotFoundError:  # not Linux: threads stay blocked until the groups' time-out
        return {}
    for number in numbers:
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:["):
                sockets[int(target[len("socket:[") : -1])] = int(number)
    return sockets


def _peer_socket(number: int, inode: int, store_port: int) -> socket.socket | None:
    """A duplicate of a connected socket of gloo's, so that shutting it never touches a reused number.

    Other threads open connections too, such as uploads and the way to the manager: gloo alone sets SO_REUSEADDR on
    both ends (tests/unit/engine/links/test_groups.py checks that it still does).
    """
    try:
        connection = socket.socket(fileno=os.dup(number))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        is_the_one = os.fstat(connection.fileno()).st_ino == inode
        if is_the_one and connection.family in (socket.AF_INET, socket.AF_INET6):
            ports = connection.getpeername()[1], connection.getsockname()[1]  # a listener has no peer
            if store_port not in ports and connection.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                return connection
    connection.close()
    return None
