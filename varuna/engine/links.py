"""Links: one channel per direction per neighbour, each with a thread of its own.

Gloo's point-to-point calls can be neither polled nor interrupted and a send waits for its receive
(``reference/engine-notes.md`` §1), so the waits live in disposable threads; the training thread never blocks on
them. Messages of a link have a fixed order, so receives are posted ahead.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from itertools import islice

import torch
from torch import Tensor

from varuna.core.errors import LinkError
from varuna.core.threads import start
from varuna.engine.inbox import Inbox
from varuna.engine.transport import Group, Work

_REMEMBERED = 256
_POSTED = 2
"""Receives that wait for their message: with one, the next message would first have to ask for a place."""


class Sender:
    """Sends buffers to one peer in the order given.

    Every message is on its way as soon as it is given; a thread waits for each to be through, and keeps it until
    then. Were the next one only started behind that wait, each would pay the link's latency again.
    """

    def __init__(self, group: Group, peer: int, tag: int, inbox: Inbox, name: str) -> None:
        self._group, self._peer, self._tag, self._inbox, self._name = group, peer, tag, inbox, name
        self._under_way: queue.SimpleQueue[tuple[Work, float] | None] = queue.SimpleQueue()
        self.sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        """bytes and seconds of the newest messages, until the transport was through with them"""
        start(f"send-{name}", self._run)

    def send(self, buffer: Tensor) -> None:
        """Start to send; returns at once. ``buffer`` must not be written any more."""
        try:
            self._under_way.put((self._group.send(buffer, self._peer, self._tag), time.monotonic()))
        except RuntimeError as error:
            self._broke(error)

    def close(self) -> None:
        """Let the thread end once everything is through or its group is abandoned."""
        self._under_way.put(None)

    def _run(self) -> None:
        try:
            while (item := self._under_way.get()) is not None:
                work, begin_s = item
                size_bytes = work.wait().nbytes
                self.sent.append((size_bytes, time.monotonic() - begin_s))
                del work, item
        except RuntimeError as error:
            self._broke(error)

    def _broke(self, error: RuntimeError) -> None:
        self._inbox.abort(LinkError(f"the link {self._name} broke while sending: {_first_line(error)}"))


class Receiver:
    """Receives the messages that a peer will send, in their known order, and puts each into the inbox."""

    def __init__(
        self,
        group: Group,
        peer: int,
        tag: int,
        inbox: Inbox,
        name: str,
        expected: Iterable[tuple[Hashable, int]],
    ) -> None:
        """Start receiving.

        Args:
            group: the generation's world group.
            peer: rank of the sender.
            tag: keeps directions apart.
            inbox: where messages go.
            name: for errors.
            expected: key and size in bytes of every message of the generation, in order; may be endless.
        """
        self._group, self._peer, self._tag, self._inbox, self._name = group, peer, tag, inbox, name
        self._expected = expected
        start(f"receive-{name}", self._run)

    def _run(self) -> None:
        posted: deque[tuple[Hashable, Work]] = deque()
        expected = iter(self._expected)
        try:
            while not self._inbox.ended:
                for key, size_bytes in islice(expected, _POSTED - len(posted)):
                    buffer = torch.empty(size_bytes, dtype=torch.uint8)
                    posted.append((key, self._group.receive(buffer, self._peer, self._tag)))
                if not posted:
                    return
                key, work = posted.popleft()
                self._inbox.put(key, work.wait())
        except RuntimeError as error:
            self._inbox.abort(LinkError(f"the link {self._name} broke while receiving: {_first_line(error)}"))


class Courier:
    """Runs blocking collectives one after another, off the training thread, and posts their results."""

    def __init__(self, inbox: Inbox, name: str) -> None:
        self._inbox, self._name = inbox, name
        self._queue: queue.SimpleQueue[tuple[Hashable, Callable[[], object]] | None] = queue.SimpleQueue()
        start(name, self._run)

    def submit(self, key: Hashable, work: Callable[[], object]) -> None:
        """Queue ``work``; its result, or an exception that is no link's, arrives in the inbox under ``key``."""
        self._queue.put((key, work))

    def close(self) -> None:
        """Let the thread end once its queue is empty."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, work = item
            if self._inbox.ended:
                return
            result: object
            try:
                result = work()
            except RuntimeError as error:
                self._inbox.abort(LinkError(f"{self._name} failed: {_first_line(error)}"))
                return
            except Exception as error:  # noqa: BLE001 - such as a damaged shard: whoever takes the result gets it
                result = error
            self._inbox.put(key, result)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
