"""Charts of a run: what ``loggers=`` takes, and the extra that tells them of steps."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from varuna.core.extras import extras

if TYPE_CHECKING:
    from varuna.job.spec import JobSpec


@runtime_checkable
class Tracker(Protocol):
    """The least that ``loggers=`` takes: anything that is told a step's values."""

    def log(self, step: int, values: Mapping[str, float]) -> Any:
        """Take the values of a step."""


class Charts(Protocol):
    """A worker's charts."""

    def add_step(self, step: int, values: Mapping[str, float], *, is_main: bool) -> None:
        """Chart a committed step, if this worker is the main one."""

    def more(self, values: Mapping[str, float]) -> None:
        """Chart more values of the newest step."""

    def close(self) -> None:
        """Write what is left, within a bound."""


class NoCharts:
    """Charts of a job without ``loggers=``."""

    def add_step(self, step: int, values: Mapping[str, float], *, is_main: bool) -> None:
        """Do nothing."""

    def more(self, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def charts_of(spec: "JobSpec") -> Charts:
    """Make the charts that a job asks for, on this worker.

    Raises:
        UsageError: the loggers are no list, or one of them is not known, not installed, or no tracker.
    """
    if spec.loggers == ():
        return NoCharts()
    [make] = extras("charts")
    made: Charts = make(spec)
    return made
