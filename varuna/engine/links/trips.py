"""Times of messages between two neighbours: from the moment one sends until the other one has all of the message.

The transport is through with a message once the sockets have taken it, which may be long before it has passed a narrow
line. So messages say when they were sent. By the receiver's clock that is off by what the two clocks differ by; the
other way it is off by as much in the other direction, and messages also say how long those that came that way took.
"""

import struct
import threading
import time
from collections import deque
from math import inf, isinf
from typing import NamedTuple

import torch
from torch import Tensor

_STAMP = struct.Struct("ddd")
STAMP_BYTES = _STAMP.size
"""Room at the end of every message between stages."""
WINDOW = 32
"""Messages of which the fastest counts: it has waited for no other one."""
KEPT = 4096
"""Most trips that wait to be taken: beyond, the oldest are forgotten."""


class ArrivalTimes(NamedTuple):
    """A message that waited for no other one, one way; means of both directions."""

    size_bytes: float
    seconds: float


_NONE = ArrivalTimes(0.0, inf)


class Trips:
    """Times that the ends of one link here, a sender and a receiver, find out together; each has a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came: deque[ArrivalTimes] = deque(maxlen=WINDOW)  # the newest messages, by both clocks
        self._found: deque[ArrivalTimes] = deque(maxlen=KEPT)

    def stamp(self, message: Tensor) -> None:
        """Write into a message, which is about to be sent, what the other end will want to know."""
        fastest = self._fastest()
        said = _STAMP.pack(time.monotonic(), fastest.seconds, fastest.size_bytes)
        message[-STAMP_BYTES:] = torch.frombuffer(bytearray(said), dtype=torch.uint8)

    def note_arrival(self, message: Tensor, size_bytes: int, at_s: float) -> None:
        """Read what a message says.

        Args:
            message: with the stamp at its end, in host memory.
            size_bytes: of all that came.
            at_s: when all of it was here.
        """
        sent_s, there_s, there_bytes = _STAMP.unpack(message[-STAMP_BYTES:].numpy().tobytes())
        with self._lock:
            self._came.append(ArrivalTimes(size_bytes, at_s - sent_s))
        here = self._fastest()
        if not isinf(there_s):
            # Each way is off by the difference of the clocks, with opposite signs: it cancels in the mean.
            self._found.append(ArrivalTimes((here.size_bytes + there_bytes) / 2, max(0.0, here.seconds + there_s) / 2))

    def drain(self) -> list[ArrivalTimes]:
        """Take all that was found since the last call."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def _fastest(self) -> ArrivalTimes:
        with self._lock:
            return min(self._came, key=lambda each: each.seconds, default=_NONE)
