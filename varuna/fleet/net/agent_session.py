"""Messages between an agent and the manager, in order, over connections that come and go; one session on each side.

Each message has a number. A side keeps what it sent until the other one has confirmed it, and drops what it has
already seen. When a new connection is made both say the newest number that they have, and send the rest again::

    agent    ──1─2─3─x                          manager has 1
    agent    ── "I am back" <── "I have 1" ──
    agent    ──2─3──────────────────────>       nothing is lost, nothing comes twice
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Generic, TypeVar

from varuna.core.value import Value

T = TypeVar("T")

_SAID_WAITING = 64


class ChannelFullError(Exception):
    """The other side has not confirmed for too long."""


class AgentSession(Generic[T]):
    """One side. Not safe for threads: it belongs to one event loop.

    Args:
        name: of the session, on both sides.
        item: the type of frame of a message: its ``number``, the newest number ``received``, its ``body``.
        limit: messages that may wait for a confirmation.
    """

    def __init__(self, name: str, item: Callable[..., Value], limit: int) -> None:
        self.name, self.item, self._limit = name, item, limit
        self.sent = 0
        """Number of the newest message that was sent."""
        self.received = 0
        """Number of the newest message that came."""
        self.waiting: deque[tuple[int, T]] = deque()
        self.connection: Outgoing[T] | None = None
        """The connection that there is at the moment."""

    def connect(self, cursor: int) -> "Outgoing[T]":
        """Go on over a new connection; the other side has everything up to ``cursor``."""
        self.connection = Outgoing(self, cursor)
        return self.connection

    def send(self, body: T) -> int:
        """Number a message and keep it until it is confirmed; it goes over this connection, or the next one.

        Raises:
            ChannelFullError: too many wait.
        """
        if len(self.waiting) >= self._limit:
            raise ChannelFullError(f"{len(self.waiting)} messages were not acknowledged")
        self.sent += 1
        self.waiting.append((self.sent, body))
        if self.connection is not None:
            self.connection.wake()
        return self.sent

    def accept(self, number: int) -> bool:
        """Return whether message ``number`` is the next one; False for one that came before.

        Raises:
            ValueError: a message between it and the newest one is missing.
        """
        if number > self.received + 1:
            raise ValueError(f"message {number} came after {self.received}: a message is missing")
        if number <= self.received:
            return False
        self.received = number
        return True

    def confirm(self, number: int) -> list[T]:
        """Note that the other side has everything up to ``number``; return what was waiting for that.

        Raises:
            ValueError: nothing of that number was ever sent.
        """
        if number > self.sent:
            raise ValueError(f"message {number} was acknowledged, but the newest one is {self.sent}")
        done = []
        while self.waiting and self.waiting[0][0] <= number:
            done.append(self.waiting.popleft()[1])
        return done


class Outgoing(Generic[T]):
    """Frames on their way over one connection of a session: what is numbered and kept, and what is said once.

    Args:
        session: outlives the connection.
        cursor: newest message of it that the other side has.
    """

    def __init__(self, session: AgentSession[T], cursor: int) -> None:
        self._session, self._cursor = session, cursor
        self._said: deque[str] = deque()
        self._wake, self._ended = asyncio.Event(), asyncio.Event()
        self.cut = ""
        """The reason why the connection has to end; empty while it need not."""

    def say(self, frame: Value) -> None:
        """Queue a frame that is not kept; a peer that asks without reading is cut."""
        self._said.append(frame.model_dump_json())
        if len(self._said) > _SAID_WAITING:
            self.end("it does not read its messages")
        self._wake.set()

    def wake(self) -> None:
        """Tell the sender that the session has new messages."""
        self._wake.set()

    def end(self, why: str) -> None:
        """Close the connection soon."""
        self.cut = self.cut or why
        self._ended.set()
        self._wake.set()

    async def ended(self) -> None:
        """Returns once the connection has to end, also while a frame is stuck on its way."""
        await self._ended.wait()

    async def send_all(self, send: Callable[[str], Awaitable[None]]) -> str:
        """Send until the connection has to end; returns why. Where ``send`` waits for a slow reader, all wait here."""
        while not self.cut:
            if (frame := self._next_frame()) is not None:
                await send(frame)
            else:
                self._wake.clear()
                await self._wake.wait()
        return self.cut

    def _next_frame(self) -> str | None:
        if self._said:
            return self._said.popleft()
        waiting = self._session.waiting
        if not waiting or waiting[-1][0] <= self._cursor:
            return None
        skip = max(0, self._cursor + 1 - waiting[0][0])
        self._cursor, body = next(islice(waiting, skip, None))
        item = self._session.item(number=self._cursor, received=self._session.received, body=body)
        return item.model_dump_json()
