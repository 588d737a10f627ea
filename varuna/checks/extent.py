"""Extent of the check of a job: as much as takes seconds, or at most two minutes, and fits into memory. Pure."""

from typing import NamedTuple

from varuna.core.model import ModelFacts

_FEW_S, _MANY_S = 45.0, 120.0
"""Seconds that a full check may take, and that the smallest may take."""
_RUN = 3
"""Cost of a forward and a backward, in forwards."""
_SAMPLES = 4
_OF_FIXED = 4
"""Micro-batches of fixed size are at most this many samples."""
_COPIES = 3
"""Copies of all parameters: two sets of gradients, and parameters as they were."""
_PARALLEL = 0.6
"""Speed that each further core adds."""


class Extent(NamedTuple):
    """The micro-batches that are run."""

    sizes: tuple[int, ...]
    """samples of each micro-batch; none: nothing is run with data"""
    divides: bool
    """their sum is compared with the whole batch, too"""
    estimate_s: float


def extent_of(
    facts: ModelFacts,
    *,
    micro_batch: int | None,
    slowdown: float,
    cores: int,
    free_bytes: float,
    exactly: bool = False,
    divides: bool = False,
) -> Extent:
    """The most that is affordable.

    Args:
        facts: of the model; their times are nominal.
        micro_batch: examples, if the user fixed it.
        slowdown: nominal seconds of one core here for a nominal second of ``facts``.
        cores: that compute.
        free_bytes: of memory.
        exactly: no micro-batch may be smaller than ``micro_batch``.
        divides: compare with the whole batch also where the user fixed the size.
    """
    fixed = micro_batch or (2 if facts.batch_dependent else None)
    forward_s = sum(section.forward_s for section in facts.sections) * slowdown / (1 + _PARALLEL * (cores - 1))
    parameters = sum(section.parameter_bytes for section in facts.sections)
    activations = sum(section.activation_bytes for section in facts.sections)
    for sizes, most_s in _choices(fixed, exactly=exactly):
        divided = (fixed is None or divides) and len(sizes) > 1
        estimate_s = 2 * (1 + divided) * _RUN * sum(sizes) * forward_s
        if estimate_s <= most_s and _COPIES * parameters + sum(sizes) * activations <= free_bytes:
            return Extent(sizes, divided, estimate_s)
    return Extent((), divides=False, estimate_s=0.0)


def of_at_least(sizes: tuple[int, ...], fewest: int) -> tuple[int, ...]:
    """Micro-batches of as many samples together, each of ``fewest`` at least; none, if there are too few."""
    if min(sizes) >= fewest:
        return sizes
    count, rest = divmod(sum(sizes), fewest)
    return (fewest + rest, *[fewest] * (count - 1)) if count else ()


def _choices(fixed: int | None, *, exactly: bool) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Sizes of micro-batches, and how long they may take; unequal ones where the user has not fixed them."""
    if fixed is None:
        return ((_SAMPLES - 1, 1), _FEW_S), ((1, 1), _FEW_S), ((1,), _MANY_S)
    most, least = (fixed, fixed) if exactly else (min(fixed, _OF_FIXED), min(fixed, 2))
    return ((most, most), _FEW_S), ((least, least), _FEW_S), ((least,), _MANY_S)
