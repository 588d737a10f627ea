"""All steps of a run in bounded memory: the newest one by one, older ones as the least, the most and the mean. Pure."""

import math
from collections import deque
from dataclasses import dataclass

from varuna.fleet.run_folder.past_events import PastStep

MOST_BUCKETS = 2000
RECENT_STEPS = 1000


@dataclass(slots=True)
class Spread:
    """The least, the most and the mean of some numbers; those that are not finite are left out."""

    least: float = math.inf
    most: float = -math.inf
    total: float = 0.0
    count: int = 0

    def add_number(self, value: float) -> None:
        """Note a number."""
        if math.isfinite(value):
            self.least, self.most = min(self.least, value), max(self.most, value)
            self.total, self.count = self.total + value, self.count + 1

    def add(self, other: "Spread") -> None:
        """Note the numbers that another one has seen."""
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.total, self.count = self.total + other.total, self.count + other.count

    @property
    def mean(self) -> float:
        """NaN if there was no number."""
        return self.total / self.count if self.count else math.nan


@dataclass(slots=True)
class StepBucket:
    """Some steps in a row."""

    first: int
    last: int
    began_s: float
    ended_s: float
    loss: Spread
    rate: Spread

    def add_point(self, point: PastStep) -> None:
        """Note the next step."""
        self.last, self.ended_s = point.step, point.time_s
        self.loss.add_number(point.loss)
        self.rate.add_number(point.examples_per_s)

    def add(self, other: "StepBucket") -> None:
        """Note the steps after these."""
        self.last, self.ended_s = other.last, other.ended_s
        self.loss.add(other.loss)
        self.rate.add(other.rate)


class StepHistory:
    """Steps of a whole run. A step that runs again replaces itself and what followed.

    Where a bucket of several steps is only partly undone, its extremes still include the steps that were undone.

    Args:
        most: buckets that are kept; when there are more, each two become one.
        recent: newest steps that are also kept one by one.
    """

    def __init__(self, most: int = MOST_BUCKETS, recent: int = RECENT_STEPS) -> None:
        self._most, self.width = most, 1
        self._buckets: list[StepBucket] = []
        self._recent: deque[PastStep] = deque(maxlen=recent)

    def add_point(self, point: PastStep) -> None:
        """Note a committed step."""
        while self._recent and self._recent[-1].step >= point.step:
            self._recent.pop()
        self._recent.append(point)
        while self._buckets and self._buckets[-1].first >= point.step:
            self._buckets.pop()
        newest = self._buckets[-1] if self._buckets else None
        if newest is not None and newest.first // self.width == point.step // self.width:
            newest.add_point(point)
            return
        bucket = StepBucket(point.step, point.step, point.time_s, point.time_s, Spread(), Spread())
        bucket.add_point(point)
        self._buckets.append(bucket)
        if len(self._buckets) > self._most:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        wide: list[StepBucket] = []
        for bucket in self._buckets:
            if wide and wide[-1].first // self.width == bucket.first // self.width:
                wide[-1].add(bucket)
            else:
                wide.append(bucket)
        self._buckets = wide

    def curve(self, most: int) -> list[float | None]:
        """The mean loss of at most so many equal parts of the run; None where it is not finite."""
        size = max(1, -(-len(self._buckets) // most))
        parts = [self._buckets[first : first + size] for first in range(0, len(self._buckets), size)]
        spreads = [Spread() for _ in parts]
        for spread, part in zip(spreads, parts, strict=True):
            for bucket in part:
                spread.add(bucket.loss)
        return [_short(spread.mean) for spread in spreads]

    def describe(self) -> dict[str, object]:
        """Columns of equal length for the buckets before the recent steps, and rows for these."""
        recent = list(self._recent)
        before = recent[0].step if recent else 0
        buckets = [bucket for bucket in self._buckets if bucket.first < before]
        return {
            "first": [each.first for each in buckets],
            "last": [min(each.last, before - 1) for each in buckets],
            "began_s": [round(each.began_s, 2) for each in buckets],
            "ended_s": [round(each.ended_s, 2) for each in buckets],
            "loss": [_shown(each.loss) for each in buckets],
            "rate": [_shown(each.rate) for each in buckets],
            "recent": [row(point) for point in recent],
        }


def row(point: PastStep) -> list[float | None]:
    """A step for a browser: number, time, loss and examples per second; None for what is not finite."""
    return [point.step, round(point.time_s, 2), _short(point.loss), _short(point.examples_per_s)]


def _shown(spread: Spread) -> list[float | None]:
    return [_short(spread.least), _short(spread.mean), _short(spread.most)]


def _short(value: float) -> float | None:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
