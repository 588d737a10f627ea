"""Links: one channel per direction per neighbour, each with a thread of its own.

Gloo's point-to-point calls can be neither polled nor interrupted and a send waits for its receive
(``reference/engine-notes.md`` §1), so they live in disposable threads; the training thread never blocks on
them. Messages of a link have a fixed order, so receives are posted ahead.
"""

import queue
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from varuna.core.errors import LinkError
from varuna.engine.inbox import Inbox
from varuna.engine.threads import start
from varuna.engine.transport import Group


class Sender:
    """Sends buffers to one peer in the order given."""

    def __init__(self, group: Group, peer: int, tag: int, inbox: Inbox, name: str) -> None:
        self._group, self._peer, self._tag, self._inbox, self._name = group, peer, tag, inbox, name
        self._queue: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        start(f"send-{name}", self._run)

    def send(self, buffer: Tensor) -> None:
        """Queue a message; returns at once. ``buffer`` must not be written any more."""
        self._queue.put(buffer)

    def close(self) -> None:
        """Let the thread end once its queue is empty or its group is abandoned."""
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (buffer := self._queue.get()) is not None:
                self._group.send(buffer, self._peer, self._tag).wait()
        except RuntimeError as error:
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
        try:
            for key, size_bytes in self._expected:
                if self._inbox.ended:
                    return
                buffer = torch.empty(size_bytes, dtype=torch.uint8)
                self._group.receive(buffer, self._peer, self._tag).wait()
                self._inbox.put(key, buffer)
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
