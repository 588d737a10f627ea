"""Sections into stages: the contiguous partition with the smallest bottleneck."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_RESOLUTION = 2**48  # costs become integers of this share of their sum, so that ties are exact


def balance(costs: Sequence[float], last_costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First section of each stage, such that the slowest stage is as fast as it can be.

    Bisection on the bottleneck: each probe fills the stages greedily from the last one, in O(P log S), and
    tells the next bottleneck that could change its outcome, so that the answer is exact. Among equal
    bottlenecks the late stages get more: they hold fewer micro-batches in flight.

    Args:
        costs: of each section on any stage but the last.
        last_costs: of each section on the last stage, where nothing is recomputed; not above ``costs``.
        stages: P, at most the number of sections.
    """
    total = sum(costs) or 1.0

    def prefix_sums(seconds: Sequence[float]) -> list[int]:
        # Sections without cost still count, so that they spread out rather than pile up.
        return list(accumulate((1 + round(cost / total * _RESOLUTION) for cost in seconds), initial=0))

    weights = _Weights(prefix_sums(costs), prefix_sums(last_costs))
    low, best = 0, _fill(weights, stages, weights.inner[-1])
    while low < best.bottleneck:
        probe = _fill(weights, stages, (low + best.bottleneck) // 2)
        if probe.starts:
            best = probe
        else:
            low = probe.bottleneck
    return best.starts


class _Weights(NamedTuple):
    """Prefix sums of the sections' integer costs."""

    inner: list[int]
    last: list[int]


class _Probe(NamedTuple):
    starts: tuple[int, ...]
    """Empty if the bound is too low."""
    bottleneck: int
    """Of the partition found; if none, the smallest bound that could change that."""


def _fill(weights: _Weights, stages: int, bound: int) -> _Probe:
    """Give each stage, from the last, as many sections as the bound and the stages before it leave."""
    end = len(weights.inner) - 1
    starts: list[int] = []
    bottleneck, retry = 0, weights.inner[-1]
    for stage in reversed(range(stages)):
        prefix = weights.last if stage == stages - 1 else weights.inner
        start = max(stage, min(end - 1, bisect_left(prefix, prefix[end] - bound)))
        start = start if stage else 0  # what is left
        weight = prefix[end] - prefix[start]
        if weight > bound:
            return _Probe((), min(retry, weight))
        if start > stage:
            retry = min(retry, prefix[end] - prefix[start - 1])
        bottleneck = max(bottleneck, weight)
        starts.append(start)
        end = start
    return _Probe(tuple(reversed(starts)), bottleneck)
