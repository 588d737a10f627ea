"""Seconds that a device takes, from one mark to another; nobody waits for the device in between."""

import time
from typing import Any, Protocol

import torch

from varuna.engine.device.streams import Event, Streams


class ActionClock(Protocol):
    """Marks, and the seconds between them."""

    def mark(self) -> Any:
        """A mark after everything that this thread has launched so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one mark to another; waits until the device has passed both."""


class HostClock:
    """Clock of a CPU, where a call returns when it is computed."""

    def mark(self) -> float:
        """The time now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """From one mark to another."""
        return end - begin


class ThreadClock(HostClock):
    """Clock of a CPU that stands still while this thread does not run; for computation by this thread alone."""

    def mark(self) -> float:
        """Processor time of this thread so far."""
        return time.thread_time()


class DeviceClock:
    """Clock of a GPU, by events of its streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def mark(self) -> Event:
        """An event after everything that is queued."""
        return self._streams.mark(self._streams.computing(), timed=True)

    def seconds(self, begin: Event, end: Event) -> float:
        """From one mark to another."""
        end.wait()
        return end.seconds_since(begin)


def clock_over(streams: Streams | None, *, undisturbed: bool = False) -> ActionClock:
    """The clock of a device with these streams; of a CPU without.

    Args:
        streams: of the device.
        undisturbed: leave out, where that is known, what other programs of the machine take.
    """
    if streams is not None:
        return DeviceClock(streams)
    return ThreadClock() if undisturbed and torch.get_num_threads() == 1 else HostClock()
