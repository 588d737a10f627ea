"""Robust statistics of repeated measurements: medians, spread, lines through medians. No torch."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple


class FittedLine(NamedTuple):
    """``fixed + per_unit * x``, neither below 0: a latency and a rate, or a fixed cost and one per byte."""

    fixed: float
    per_unit: float

    def at(self, x: float) -> float:
        """The value at ``x``."""
        return self.fixed + self.per_unit * x


def fit_line(points: Iterable[tuple[float, float]]) -> FittedLine:
    """The line through measured points (x, y): median of all slopes (Theil-Sen), then median of the intercepts.

    One outlier does not move it. Several values at one x count by their median. Costs are never negative, so a
    slope or an intercept below 0 is noise: it is set to 0 and the other is fitted alone.

    Raises:
        ValueError: there is no point.
    """
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    if not by_x:
        raise ValueError("a line needs at least one measured point")
    medians = sorted((x, statistics.median(values)) for x, values in by_x.items())
    if len(medians) == 1:
        return FittedLine(medians[0][1], 0.0)
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(medians, 2))
    if slope <= 0:
        return FittedLine(statistics.median(y for _, y in medians), 0.0)
    fixed = statistics.median(y - slope * x for x, y in medians)
    if fixed < 0:
        return FittedLine(0.0, statistics.median(y / x for x, y in medians if x > 0))
    return FittedLine(fixed, slope)


_HICCUP = 1.5
"""A multiple of the median; a longer time means that something else ran."""


def mean_time(values: Sequence[float]) -> float:
    """Mean of repeated times, without outliers.

    A step is a sum of many actions. Its median is near the sum of their means, and beyond the sum of their medians,
    since times have a tail on one side only.

    Raises:
        ValueError: there is no value.
    """
    bound = _HICCUP * statistics.median(values)
    return statistics.fmean(value for value in values if value <= bound)


def quantiles(values: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    """Quantiles by linear interpolation between the sorted values.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("quantiles need at least one value")
    ordered = sorted(values)
    found = []
    for share in shares:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (place - low) * (ordered[high] - ordered[low]))
    return tuple(found)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median: how far to trust a measurement."""
    low, middle, high = quantiles(values, (0.25, 0.5, 0.75))
    return (high - low) / 2 / middle if middle else 0.0


def best_size(sizes: Iterable[int], seconds: Callable[[int], float | None], *, worth: float = 0.03) -> dict[int, float]:
    """Sweep m upward until F(m)/m stops improving (paper §"Parametrized Simulation") or memory ends.

    Two sizes in a row that save less than ``worth`` end the sweep: one may be an outlier.

    Args:
        sizes: ascending.
        seconds: time at a size; None if memory does not hold it.
        worth: share of the time per example that a larger size must save.

    Returns:
        size -> seconds, of every size that was measured.
    """
    measured: dict[int, float] = {}
    best = float("inf")
    stale = 0
    for size in sizes:
        taken = seconds(size)
        if taken is None:
            break
        measured[size] = taken
        stale = 0 if taken / size < best * (1 - worth) else stale + 1
        best = min(best, taken / size)
        if stale == 2:
            break
    return measured
