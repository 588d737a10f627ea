"""The seam to c10d: raw Gloo groups and stores, with a bound on every operation.

Typed here once, since torch's own annotations leave these calls out.
"""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.engine.base.peer_sockets import with_epoll

c10d: Any = dist
Store: Any = c10d.Store

OPERATION_BOUND_S = 100_000.0
"""Longer than any wait in the inbox (``wait_bounds``), which ends what is blocked here by abandoning the group."""
FORMING_BOUND_S = 30.0
"""Members of a generation look for each other at most this long."""
_SWAP_TAG = 80_000
_SHORTEST_S = 0.001  # a bound of 0 is none to Gloo


class Work:
    """A transfer in progress; keeps its buffer alive."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work = work
        self.buffer = buffer

    def wait(self, bound_s: float = OPERATION_BOUND_S) -> Tensor:
        """Block until the transfer is done.

        Raises:
            RuntimeError: the peer is gone, the group was abandoned, or the bound has passed.
        """
        self._work.wait(timedelta(seconds=bound_s))
        return self.buffer


class Group:
    """A Gloo process group of one generation."""

    def __init__(self, store: Any, name: str, rank: int, size: int, interface_host: str) -> None:
        """Connect to all other members; blocks until they do the same.

        Args:
            store: lives outside the workers.
            name: prefix of this group's keys in the store.
            rank: this member.
            size: number of members.
            interface_host: address of the private interface to bind to.

        Raises:
            RuntimeError: a member did not come within the bound.
        """
        options = c10d.ProcessGroupGloo._Options()
        device, self._epoll = with_epoll(lambda: c10d.ProcessGroupGloo.create_device(hostname=interface_host))
        options._devices = [device]
        options._timeout = timedelta(seconds=FORMING_BOUND_S)
        self._group = c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, size, options)
        self._rank = rank
        self.size = size

    def sockets(self) -> list[socket.socket]:
        """Duplicates of its connections to other members; none where they cannot be told (no Linux)."""
        return [] if self._epoll is None else self._epoll.sockets()

    def send(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Start to send; ``buffer`` must not change until the transfer is done."""
        return Work(self._group.send([buffer], peer, tag), buffer)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Start to receive into ``buffer``."""
        return Work(self._group.recv([buffer], peer, tag), buffer)

    def all_reduce(self, values: Tensor) -> None:
        """Sum over all members, in place; blocks.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        options = c10d.AllreduceOptions()
        options.timeout = timedelta(seconds=OPERATION_BOUND_S)
        self._group.allreduce([values], options).wait()

    def exchange(self, values: Tensor, bound_s: float = OPERATION_BOUND_S) -> Tensor:
        """Cut ``values`` into as many equal parts as there are members; this member's part of everyone's, in order.

        In host memory, as what ``gather`` takes.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        theirs = torch.empty_like(values)
        self._swap(_bytes(values).chunk(self.size), _bytes(theirs).chunk(self.size), bound_s)
        return theirs

    def gather(self, part: Tensor) -> Tensor:
        """All members' flat parts, which are of one size, in order.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        whole = torch.empty(self.size * part.numel(), dtype=part.dtype)
        self._swap([_bytes(part)] * self.size, _bytes(whole).chunk(self.size), OPERATION_BOUND_S)
        return whole

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor], bound_s: float) -> None:
        """Send ``sent[peer]`` to each peer while ``received[peer]`` comes from it; all of it within the bound.

        Everything is asked for before anything is sent: Gloo sends what was asked for, and on the same connection a
        question waits for the data that was sent before it. Gloo's own collectives send first, so a member that is
        early sends its part, and only then gets what it needs.
        """
        deadline_s = time.monotonic() + bound_s
        peers = [(self._rank + more) % self.size for more in range(1, self.size)]
        coming = [self.receive(received[peer], peer, _SWAP_TAG) for peer in peers]
        going = [self.send(sent[peer], peer, _SWAP_TAG) for peer in peers]
        received[self._rank].copy_(sent[self._rank])
        for work in (*coming, *going):
            work.wait(max(_SHORTEST_S, deadline_s - time.monotonic()))


def _bytes(values: Tensor) -> Tensor:
    """The same memory as bytes, since gloo does not know every dtype."""
    return values.view(torch.uint8)


def connect_store(host: str, port: int, *, hosts: bool = False, bound_s: float = 60.0) -> Any:
    """A client of a TCP store, or the store itself.

    Raises:
        RuntimeError: it does not answer.
    """
    return c10d.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=bound_s))


def local_store() -> Any:
    """A store for a single process."""
    return c10d.HashStore()


def prefixed(prefix: str, store: Any) -> Any:
    """A view on ``store`` whose keys start with ``prefix``."""
    return c10d.PrefixStore(prefix, store)
