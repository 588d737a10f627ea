"""The seam between a run and whoever supplies its nodes."""

from typing import Protocol

from varuna.core.errors import FleetError


class CapacityError(FleetError):
    """The cloud cannot supply what was asked for now; it may later, so it is asked again."""


class Provider(Protocol):
    """A group of nodes with a wished size. Engines and clouds keep it at that size as well as they can."""

    def resize(self, nodes: int) -> None:
        """Wish for this many nodes; returns once the wish is taken down, not once they run.

        Raises:
            CapacityError: not now; the wish may still stand.
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
