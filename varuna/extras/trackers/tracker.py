"""Trackers as services, and how a step that is redone appears in a chart once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from varuna.job.charts import Tracker

REDONE = "run/redone_steps"
"""Value that marks the first step after a rollback: how many steps before it were computed twice."""


class Service(Protocol):
    """A tracker that knows of charts which are continued."""

    def begin(self, chart: str, step: int, config: Mapping[str, object]) -> None:
        """Continue a chart, new or begun earlier, maybe by another process; ``step`` is the next one.

        It is called again when a run falls back: then steps come that the chart has already.
        """

    def log(self, step: int, values: Mapping[str, float], *, more: bool = False) -> None:
        """Take the values of a step, or ``more`` of them for the same step."""

    def close(self) -> None:
        """Write what is left; the chart may be continued later."""


@dataclass
class Once:
    """The steps that a chart has: those that come again are left out, since their values are the same.

    Attributes:
        reached: the newest step in the chart; -1 before any.
    """

    reached: int = -1
    _redone: int = field(default=0, init=False)
    _is_again: bool = field(default=False, init=False)

    def begin(self, step: int) -> None:
        """Begin a chart whose next step is ``step``."""
        self._redone = max(self._redone, self.reached - step + 1)

    def new(self, step: int, values: Mapping[str, float], *, more: bool) -> dict[str, float]:
        """Return those of ``values`` that the chart lacks; nothing for a step that it has."""
        if not more:
            self._is_again = step <= self.reached
        if self._is_again:
            return {}
        mark = {REDONE: float(self._redone)} if self._redone and not more else {}
        if not more:
            self.reached, self._redone = step, 0
        return {**values, **mark}


class Own:
    """A user's tracker as a service: it is told each step once by each process.

    Args:
        tracker: has ``log(step, values)``.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._once = tracker, Once()

    def begin(self, chart: str, step: int, config: Mapping[str, object]) -> None:
        """Do nothing: the user has opened it."""
        self._once.begin(step)

    def log(self, step: int, values: Mapping[str, float], *, more: bool = False) -> None:
        """Pass on what is new."""
        if found := self._once.new(step, values, more=more):
            self._tracker.log(step, found)

    def close(self) -> None:
        """Do nothing: the object is the user's."""
