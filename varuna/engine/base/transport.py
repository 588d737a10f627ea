"""Groups of members that are connected each with each, sums over them, and the stores by which they find each other.

c10d's stores are typed here once, since torch's own annotations leave these calls out.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.core.times import Compressed
from varuna.engine.base.connection import OPERATION_BOUND_S, Connection, Unreachable, Work
from varuna.engine.base.endpoint import Endpoint, Way
from varuna.engine.base.meeting import meet

__all__ = ["OPERATION_BOUND_S", "Group", "Work"]

c10d: Any = dist
Store: Any = c10d.Store

FORMING_BOUND_S = 30.0
"""Members of a generation look for each other at most this long."""
AT_ONCE = 2**21
"""Numbers of a sum that travel together, so that the buffers of two turns stay below 16 MiB."""
_SMALL_BYTES = 2**14
"""Up to this much of each member's is sent to all whole: one trip in place of two."""
_SWAP_TAG, _SUM_TAG = 80_000, 80_001
_SHORTEST_S = 0.001


class Group:
    """Members of one generation, connected each with each."""

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        endpoint: Endpoint,
        *,
        ranks: Sequence[int] | None = None,
        silent_s: float | None = None,
        compresses: bool = False,
    ) -> None:
        """Connect to all other members; blocks until they do the same.

        Args:
            store: lives outside the workers.
            name: prefix of this group's keys in the store.
            rank: this member.
            size: number of members.
            endpoint: how others reach this process.
            ranks: of the generation, which the members are; the same numbers by default.
            silent_s: how long a member may take nothing, where the others can continue without it; None: for long.
            compresses: what is sent, where a line is waited for. Not to measure the line itself.

        Raises:
            RuntimeError: a member did not come within the bound.
        """
        known = range(size) if ranks is None else ranks
        try:
            met = meet(prefixed(name, store), rank, size, endpoint, FORMING_BOUND_S)
        except Unreachable as error:
            raise Unreachable(str(error), known[error.peer]) from error
        self._connections = {
            other: Connection(
                each.connected,
                f"{name}, rank {known[rank]} with rank {known[other]}",
                known[other],
                silent_s,
                compresses=compresses,
            )
            for other, each in met.items()
        }
        self.relayed = tuple(sorted(known[other] for other, each in met.items() if each.way == Way.RELAYED))
        """Members, by their rank in the generation, to whom everything goes through another machine."""
        self._rank = rank
        self.size = size
        # Where it is not abandoned. Not at the end of a forked process, whose sockets are this one's, too.
        dropped = weakref.finalize(self, _hang_up, os.getpid(), tuple(self._connections.values()))
        dropped.atexit = False

    @property
    def compressed(self) -> Compressed:
        """Bytes that this member has sent compressed, before and after compression."""
        return reduce(Compressed.plus, (each.compressed for each in self._connections.values()), Compressed())

    def abandon(self) -> None:
        """End all transfers, with an error for each thread that waits."""
        for each in self._connections.values():
            each.end()

    def send(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Start to send; ``buffer`` must not change until the transfer is done.

        Raises:
            RuntimeError: the peer is gone, or the group was abandoned.
        """
        return self._connections[peer].send(buffer, tag)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Start to receive into ``buffer``.

        Raises:
            RuntimeError: as ``send``.
        """
        return self._connections[peer].receive(buffer, tag)

    def all_reduce(self, values: Tensor, *, crossing: torch.dtype | None = None, at_once: int = AT_ONCE) -> None:
        """Sum over all members, in place; blocks. All get the same bits: those of a sum in the order of ranks.

        Each member adds up its share of the numbers as all members have them, and then all gather the shares.

        Args:
            values: contiguous, in host memory.
            crossing: dtype in which numbers cross, both ways; that of ``values`` by default.
            at_once: how many numbers travel together.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        if self.size == 1:
            return
        flat, dtype = values.view(-1), crossing or values.dtype
        if flat.numel() * dtype.itemsize <= _SMALL_BYTES:
            whole = torch.empty(self.size, flat.numel(), dtype=dtype)
            self._swap([flat.to(dtype)] * self.size, list(whole), _SUM_TAG).wait()
            flat.copy_(_sum(list(whole), values.dtype).to(dtype))
            return
        chunks, begun, gathers = torch.split(flat, at_once), deque[_Shares](), _Swap()
        # Two sets in turn: the shares of a chunk come in while those of the chunk before are added up.
        rooms: tuple[list[Tensor], list[Tensor]] = ([], [])
        for number, chunk in enumerate(chunks):
            begun.append(self._share_out(chunk.to(dtype), rooms[number % 2]))
            if number:  # shares travel while those before them are added up
                gathers = self._add_up(begun.popleft(), chunks[number - 1], gathers)
        self._add_up(begun.popleft(), chunks[-1], gathers).wait()

    def _share_out(self, wire: Tensor, rooms: list[Tensor]) -> "_Shares":
        """Begin to give each member its share of the numbers; ``rooms`` are for what comes, and are used again."""
        shares = wire.tensor_split(self.size)
        mine = shares[self._rank]
        while len(rooms) < self.size:
            rooms.append(torch.empty_like(mine))  # the first chunk is the largest
        rows = [mine if peer == self._rank else room[: mine.numel()] for peer, room in enumerate(rooms)]
        return _Shares(wire, shares, rows, self._swap(shares, rows, _SUM_TAG))

    def _add_up(self, shares: "_Shares", chunk: Tensor, before: "_Swap") -> "_Swap":
        """Add up this member's share, and begin to gather all, once ``before`` is through."""
        shares.swap.wait()
        mine = shares.all[self._rank]
        if (total := _sum(shares.rows, chunk.dtype)) is not mine:
            mine.copy_(total)
        before.wait()
        then = None if shares.wire.data_ptr() == chunk.data_ptr() else partial(chunk.copy_, shares.wire)
        return self._swap([mine] * self.size, shares.all, _SUM_TAG, then)

    def exchange(self, values: Tensor, bound_s: float = OPERATION_BOUND_S) -> Tensor:
        """Cut ``values`` into as many equal parts as there are members; this member's part of everyone's, in order.

        In host memory.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        theirs = torch.empty_like(values)
        self._swap(values.chunk(self.size), theirs.chunk(self.size), _SWAP_TAG).wait(bound_s)
        return theirs

    def _swap(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int, then: Callable[[], object] | None = None
    ) -> "_Swap":
        """Begin to send ``sent[peer]`` to each peer and to receive ``received[peer]`` from it.

        Everything is asked for before anything is sent: a member that is early has what it needs on its way.
        """
        # Each member begins with another peer, or all would send to rank 0 first.
        peers = [(self._rank + more) % self.size for more in range(1, self.size)]
        coming = [self.receive(received[peer], peer, tag) for peer in peers]
        going = [self.send(sent[peer], peer, tag) for peer in peers]
        if received[self._rank] is not sent[self._rank]:
            received[self._rank].copy_(sent[self._rank])
        return _Swap((*coming, *going), then)


class _Swap(NamedTuple):
    """Transfers that end together."""

    works: Sequence[Work] = ()
    then: Callable[[], object] | None = None

    def wait(self, bound_s: float = OPERATION_BOUND_S) -> None:
        """Wait for all, ``bound_s`` in total."""
        deadline_s = time.monotonic() + bound_s
        for work in self.works:
            work.wait(max(_SHORTEST_S, deadline_s - time.monotonic()))
        if self.then is not None:
            self.then()


class _Shares(NamedTuple):
    """Numbers that are being added up, each member's share by that member."""

    wire: Tensor
    """the numbers as they cross"""
    all: Sequence[Tensor]
    """views of it"""
    rows: Sequence[Tensor]
    """this member's share, as each member has it"""
    swap: _Swap
    """brings the rows"""


def _hang_up(process: int, connections: Iterable[Connection]) -> None:
    for each in connections if os.getpid() == process else ():
        each.hang_up()


def _sum(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Add rows up, one after another, in the memory of the first if that has the dtype."""
    # In the order of ranks, by one member for each number: all get the same bits, on any network.
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total.add_(row)
    return total


def connect_store(host: str, port: int, *, hosts: bool = False, bound_s: float = 60.0) -> Any:
    """Connect to a TCP store, or make the store itself.

    Raises:
        RuntimeError: it does not answer.
    """
    return c10d.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=bound_s))


def local_store() -> Any:
    """Make a store for a single process."""
    return c10d.HashStore()


def prefixed(prefix: str, store: Any) -> Any:
    """Make a view on ``store`` whose keys start with ``prefix``."""
    return c10d.PrefixStore(prefix, store)
