"""Sections into stages: the contiguous partition with the smallest bottleneck."""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

_NOTHING = 1e-12  # share of the sum that a section counts at least, so that those without cost spread out
_STRIDE, _GROWTH = 0.02, 3  # of the first stride away from a guess; of each further one
_FAR = 0.5  # strides beyond which anything goes
_MOST_S = sys.float_info.max

Weigh = Callable[[int, int, int], float]
"""Seconds of a stage that runs sections [start, stop): ``weigh(stage, start, stop)``; infinite if it does not fit.

Never less for more sections."""


def balance(costs: Sequence[float], last_costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First section of each stage, such that the slowest stage is as fast as it can be.

    Args:
        costs: of each section on any stage but the last.
        last_costs: of each section on the last stage, where nothing is recomputed; not above ``costs``.
        stages: P, at most the number of sections.
    """
    least = (sum(costs) or 1.0) * _NOTHING
    inner, last = (list(accumulate((cost + least for cost in each), initial=0.0)) for each in (costs, last_costs))

    def weigh(stage: int, start: int, stop: int) -> float:
        sums = last if stage == stages - 1 else inner
        return sums[stop] - sums[start]

    return balance_stages(weigh, sections=len(costs), stages=stages)


def balance_stages(
    weigh: Weigh,
    *,
    sections: int,
    stages: int,
    cuts_s: Sequence[float] = (),
    hint_s: float = 0.0,
    least_s: float = 0.0,
    precision: float = 1e-9,
) -> tuple[int, ...]:
    """First section of each stage; empty if no partition fits.

    Bisection on the bottleneck: each probe fills the stages greedily from the last one, and tells the next
    bottleneck that could change its outcome. Among equal bottlenecks the late stages get more: they hold fewer
    micro-batches in flight.

    Args:
        weigh: seconds of a stage.
        sections: of the model.
        stages: P, at most ``sections``.
        cuts_s: seconds that a message over the cut before each section occupies its link: a bottleneck like a stage.
        hint_s: a guess at the bottleneck, tried first.
        least_s: a lower bound of the bottleneck.
        precision: of the bottleneck, relative.
    """
    cuts = cuts_s or (0.0,) * sections
    low, best = least_s * (1 - precision), _Probe((), float("inf"))
    stride = _STRIDE
    bound_s = hint_s or float("inf")
    while low < best.bottleneck_s * (1 - precision):
        probe = _fill(weigh, cuts, stages, bound_s)
        if probe.starts:
            best = probe
        elif bound_s == float("inf"):
            break
        else:
            low = probe.bottleneck_s
        # A guess is near: stride away from it until the answer lies between, then halve.
        if best.starts:
            bound_s = max((low + best.bottleneck_s) / 2, best.bottleneck_s * (1 - stride))
        else:
            bound_s = low * (1 + stride) if stride < _FAR else float("inf")
        stride *= _GROWTH
    return best.starts


class _Probe(NamedTuple):
    starts: tuple[int, ...]
    """Empty if the bound is too low."""
    bottleneck_s: float
    """Bottleneck of the partition found; if there is none, the smallest bound that could change that."""


def _fill(weigh: Weigh, cuts_s: Sequence[float], stages: int, bound_s: float) -> _Probe:
    """Give each stage, from the last, as many sections as the bound and the stages before it leave."""
    bound_s = min(bound_s, _MOST_S)  # what does not fit weighs more
    end = len(cuts_s)
    length = max(1, end // stages)  # about as many sections as in the stage before
    starts: list[int] = []
    bottleneck_s, retry_s = 0.0, float("inf")
    for stage in range(stages - 1, -1, -1):
        start = max(stage, end - length) if stage else 0
        weight_s = weigh(stage, start, end)
        if stage:
            start, weight_s, beyond_s = _furthest(weigh, stage, start, end, weight_s, bound_s)
            if beyond_s < retry_s:
                retry_s = beyond_s
            if cuts_s[start] > bound_s:
                while start < end - 1 and cuts_s[start] > bound_s:
                    retry_s = min(retry_s, cuts_s[start])
                    start += 1
                weight_s = weigh(stage, start, end)
            if cuts_s[start] > weight_s:
                weight_s = cuts_s[start]
        if weight_s > bound_s:
            return _Probe((), min(retry_s, weight_s))
        if weight_s > bottleneck_s:
            bottleneck_s = weight_s
        starts.append(start)
        length, end = end - start, start
    return _Probe(tuple(reversed(starts)), bottleneck_s)


def _furthest(
    weigh: Weigh, stage: int, start: int, end: int, weight_s: float, bound_s: float
) -> tuple[int, float, float]:
    """First section of the largest stage below the bound, sought from ``start``; its weight, and one section more's."""
    beyond_s = float("inf")
    if weight_s > bound_s:
        while start < end - 1 and weight_s > bound_s:
            beyond_s = weight_s
            start += 1
            weight_s = weigh(stage, start, end)
        return start, weight_s, beyond_s
    while start > stage:
        beyond_s = weigh(stage, start - 1, end)
        if beyond_s > bound_s:
            return start, weight_s, beyond_s
        start -= 1
        weight_s = beyond_s
    return start, weight_s, float("inf")
