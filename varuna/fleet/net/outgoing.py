"""Frames on their way over one connection: what is numbered and kept, and what is said once."""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

from varuna.fleet.net.channel import Channel

T = TypeVar("T")

_SAID_WAITING = 64


class Outgoing(Generic[T]):
    """Made for one connection, used on its event loop only.

    Args:
        channel: outlives the connection.
        cursor: newest message of it that the other side has.
        frame: makes a frame of a number, the newest number that came, and a message.
    """

    def __init__(self, channel: Channel[T], cursor: int, frame: Callable[[int, int, T], str]) -> None:
        self._channel, self._cursor, self._frame = channel, cursor, frame
        self._said: deque[str] = deque()
        self._wake, self._ended = asyncio.Event(), asyncio.Event()
        self.cut = ""
        """Why the connection has to end; empty while it need not."""

    def say(self, frame: str) -> None:
        """Queue a frame that is not kept; a peer that asks without reading is cut."""
        self._said.append(frame)
        if len(self._said) > _SAID_WAITING:
            self.end("it does not read its messages")
        self._wake.set()

    def wake(self) -> None:
        """Tell the sender that the channel has new messages."""
        self._wake.set()

    def end(self, why: str) -> None:
        """Close the connection soon."""
        self.cut = self.cut or why
        self._ended.set()
        self._wake.set()

    async def ended(self) -> None:
        """Returns once the connection has to end, also while a frame is stuck on its way."""
        await self._ended.wait()

    async def next_frame(self) -> str | None:
        """The next frame to send; None once the connection has to end."""
        while not self.cut:
            if self._said:
                return self._said.popleft()
            waiting = self._channel.waiting
            if waiting and waiting[-1][0] > self._cursor:
                skip = max(0, self._cursor + 1 - waiting[0][0])
                self._cursor, body = next(islice(waiting, skip, None))
                return self._frame(self._cursor, self._channel.received, body)
            self._wake.clear()
            await self._wake.wait()
        return None
