"""The interface between a run and the cloud that supplies its nodes."""

from typing import Protocol

from varuna.core.errors import FleetError


class CapacityError(FleetError):
    """The cloud cannot supply what was asked for now; it may later, so it is asked again."""


class CancelledThere(FleetError):
    """A person has ended the run where its nodes come from, by the tools of that place: the run ends in order."""


class Provider(Protocol):
    """A group of nodes with a requested size. Engines and clouds keep it at that size as well as they can."""

    def resize(self, nodes: int) -> None:
        """Request this many nodes; returns once the request is accepted, not once they run.

        Raises:
            CapacityError: not now; the request may still stand.
            FleetError: never, such as without permission or without such a group.
        """
        ...

    def size(self) -> int:
        """Nodes that exist or are starting.

        Raises:
            CapacityError: the answer is not to be had now.
            FleetError: never.
        """
        ...

    def close(self) -> None:
        """Let go of the group: what the run asked for and does not need any more is given back."""
        ...
