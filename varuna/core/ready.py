"""Handles to wait for: a copy that is leaving a device, or nothing at all."""

from typing import Protocol


class Ready(Protocol):
    """Something that will be finished; on a GPU, a point of a stream."""

    def wait(self) -> None:
        """Block this thread until it is finished."""


class Done:
    """A ``Ready`` that is already finished."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()
