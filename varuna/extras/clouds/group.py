"""A group of machines with a desired size: the same rules for every cloud that has one."""

from dataclasses import dataclass
from typing import Protocol

from varuna.core.errors import FleetError
from varuna.extras.clouds.original_size import OriginalSize
from varuna.fleet.engines.provider import CapacityError

_CONTESTED = 3
"""Looks in a row that found a size of another's: a person sets it once, another run again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """Sizes of a group, as its cloud reports them."""

    desired: int
    """Machines that it should have."""
    running: int
    """Machines that run or start."""
    least: int = 0
    most: int | None = None
    """The group's own bounds, above ours."""
    gave_up: bool = False
    """The cloud does not try again by itself."""


class GroupApi(Protocol):
    """One group of one cloud; every method raises CapacityError if asking again may help, else FleetError."""

    name: str
    """For messages, such as ``Auto Scaling group trainers``."""

    def read(self) -> GroupState:
        """Read the group's sizes."""
        ...

    def resizing(self, nodes: int) -> str:
        """Return the call that ``resize`` would make, to show."""
        ...

    def resize(self, nodes: int) -> None:
        """Set the desired size."""
        ...

    def complain(self) -> None:
        """Raise what keeps machines from starting, if the cloud says."""
        ...


class GroupProvider:
    """Sets a group's desired size for the run, within its bounds and the group's.

    Args:
        api: the group.
        before: keeps the size that it has before the first request, over managers' restarts.

    Raises:
        CapacityError: the cloud does not answer now.
        FleetError: there is no such group, or no permission.
    """

    def __init__(self, api: GroupApi, before: OriginalSize) -> None:
        self._api, self._before = api, before
        self._wished: int | None = None
        self._set: int | None = None  # by this manager, and accepted
        self._contested = 0
        api.read()

    def resize(self, nodes: int) -> None:
        """Set the desired size; raise what the cloud says if machines are missing.

        Raises:
            CapacityError: the group's maximum is lower, or the cloud has no such machines now.
            FleetError: no permission, the group is gone, or another run or policy sets its size again and again.
        """
        state = self._api.read()
        self._note_others(state.desired, nodes)
        self._before.keep_size(state.desired)
        allowed = _within(state, nodes)
        self._wished = allowed
        if state.desired != allowed:
            self._api.resize(allowed)
        self._set = allowed
        if allowed < nodes:
            raise CapacityError(f"the maximum size of {self._api.name} is {allowed}")
        if state.running < allowed and state.desired == allowed:
            try:
                self._api.complain()
            finally:
                if state.gave_up:
                    self._api.resize(allowed)

    def size(self) -> int:
        """Return the number of machines that run or start; errors as of ``resize``."""
        return self._api.read().running

    def rehearse(self, nodes: int) -> list[str]:
        """Return the calls that would change something now, to show; errors as of ``resize``."""
        state = self._api.read()
        allowed = _within(state, nodes)
        return [self._api.resizing(allowed)] if allowed != state.desired else []

    def close(self) -> None:
        """Put the size back to what it was before the run, unless another run or a person has changed it.

        Raises:
            CapacityError: the cloud does not answer now.
            FleetError: no permission, or the group is gone; or the size is another's, and not what it was.
        """
        if self._wished is None:
            return
        now, before = self._api.read().desired, self._before.keep_size(self._wished)
        if now == self._wished != before:
            self._api.resize(before)
        self._before.drop()
        if now not in (self._wished, before):
            raise FleetError(
                f"{self._api.name} keeps the size {now}, which somebody else has set; before this run it was {before}. "
                "If nobody needs those machines, set it back by hand: they cost money"
            )

    def _note_others(self, desired: int, nodes: int) -> None:
        """Count looks at which the size is not the one that this run has set, and the cloud does not say why."""
        is_other = self._set not in (None, desired)
        if is_other:
            try:
                self._api.complain()
            except CapacityError:
                is_other = False
        self._contested = self._contested + 1 if is_other else 0
        if self._contested >= _CONTESTED:
            raise FleetError(
                f"somebody else sets the size of {self._api.name} again and again, now to {desired}, while this run "
                f"needs {nodes}. Is it another run, or a scaling policy? Give each run a group of its own"
            )


def _within(state: GroupState, nodes: int) -> int:
    """Return the size to ask for, within the group's own bounds."""
    wanted = max(nodes, state.least)
    return wanted if state.most is None else min(wanted, state.most)
