"""Seconds that a device takes, from one mark to another; nobody waits for the device in between."""

import time
from typing import Any, Protocol

from varuna.engine.device.streams import Event, Streams


class ActionClock(Protocol):
    """Marks, and the seconds between them."""

    def mark(self) -> Any:
        """Behind what this thread has had computed so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another; waits until the device has passed both."""


class HostClock:
    """Of a CPU: what was called is computed."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """From one mark to another."""
        return end - begin


class DeviceClock:
    """Of a GPU: its own events."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def mark(self) -> Event:
        """Behind what is queued."""
        return self._streams.mark(self._streams.computing(), timed=True)

    def seconds(self, begin: Event, end: Event) -> float:
        """From one mark to another."""
        end.wait()
        return end.seconds_since(begin)


def clock_over(streams: Streams | None) -> ActionClock:
    """Of a device with these streams."""
    return HostClock() if streams is None else DeviceClock(streams)
