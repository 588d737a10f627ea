"""What will be done: a copy on its way out of a device, or nothing at all."""

from typing import Protocol


class Ready(Protocol):
    """Something that will be done; on a GPU, a point of a stream."""

    def wait(self) -> None:
        """Block this thread until it is."""


class Done:
    """It is."""

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()
