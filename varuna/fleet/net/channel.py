"""An ordered stream of messages over connections that come and go; pure, one on each side.

Each message has a number. A side keeps what it sent until the other one has confirmed it, and drops what it has
already seen. When a new connection is made both say the newest number that they have, and send the rest again::

    agent    ──1─2─3─x                          manager has 1
    agent    ── "I am back" <── "I have 1" ──
    agent    ──2─3──────────────────────>       nothing is lost, nothing comes twice
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelFullError(Exception):
    """The other side has not confirmed for too long."""


@dataclass
class Channel(Generic[T]):
    """One side. Not safe for threads: it belongs to one event loop.

    Args:
        limit: messages that may wait for a confirmation.
    """

    limit: int
    sent: int = 0
    """Number of the newest message that was sent."""
    received: int = 0
    """Number of the newest message that came."""
    waiting: deque[tuple[int, T]] = field(default_factory=deque)

    def send(self, body: T) -> int:
        """Number a message and keep it until it is confirmed.

        Raises:
            ChannelFullError: too many wait.
        """
        if len(self.waiting) >= self.limit:
            raise ChannelFullError(f"{len(self.waiting)} messages were not acknowledged")
        self.sent += 1
        self.waiting.append((self.sent, body))
        return self.sent

    def accept(self, number: int) -> bool:
        """Whether message ``number`` is the next one; False for one that came before.

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
        """The other side has everything up to ``number``; returns what was waiting for that.

        Raises:
            ValueError: nothing of that number was ever sent.
        """
        if number > self.sent:
            raise ValueError(f"message {number} was acknowledged, but the newest one is {self.sent}")
        done = []
        while self.waiting and self.waiting[0][0] <= number:
            done.append(self.waiting.popleft()[1])
        return done
