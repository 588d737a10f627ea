"""Whether two outcomes of one computation differ by more than rounding.

A difference of a gradient is small if it is so beside that gradient, or beside rounding errors of the largest gradient
of the model: many a gradient is zero but for them (a bias in front of a softmax or a normalisation). What is not small
is compared with what plain PyTorch itself does when its parameters move by their last bit.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from varuna.checks.outcome import Outcome

_TIMES_NOISE = 30.0
"""A multiple of the noise: other sums round in other places than parameters moved by their last bit."""

What = Literal["loss", "gradient", "buffer", "metric"]


@dataclass(frozen=True)
class Difference:
    """One value of two outcomes, side by side."""

    what: What
    name: str
    """of the parameter, buffer or metric"""
    apart: float
    """absolute, where it is largest"""
    beside: float
    """for a gradient, the largest element of all that are expected; else its own"""
    found: float
    """the loss or metric, or the largest element"""
    expected: float

    @property
    def error(self) -> float:
        """Relative difference."""
        return self.apart / (self.beside or 1.0)

    @property
    def missing(self) -> bool:
        """There is no gradient, or one of zeros, where there should be one."""
        return self.what == "gradient" and self.expected > 0 and self.found == 0


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that need no further look."""

    loss: float
    own: float
    """of a gradient or buffer, beside itself"""
    beside_all: float
    """of a gradient, beside the largest of the model"""

    def room(self, each: Difference) -> float:
        """Room that a value has for rounding."""
        if each.what in ("loss", "metric"):
            return self.loss * abs(each.expected)
        beside_all = self.beside_all * each.beside if each.what == "gradient" and not each.missing else 0.0
        return max(self.own * each.expected, beside_all)


TOLERANCES = {
    torch.float32: Tolerance(loss=2e-6, own=2e-5, beside_all=1e-6),
    torch.float16: Tolerance(loss=2e-3, own=5e-3, beside_all=1e-4),
    torch.bfloat16: Tolerance(loss=1e-2, own=2e-2, beside_all=1e-3),
}

Noise = Mapping[tuple[What, str], float]
"""Absolute differences between outcomes of plain PyTorch itself, by what differs and its name"""


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The coarsest of the dtypes that a model computes in, which limits its results."""
    return max(dtypes, key=lambda each: torch.finfo(each).eps)


@dataclass(frozen=True)
class Errors:
    """Largest relative differences."""

    loss: float
    gradient: float
    """relative to the largest gradient of the model"""
    parameter: str
    """the parameter whose gradient differs most; empty if none does"""


def errors(found: Outcome, expected: Outcome) -> Errors:
    """Measure how far apart two outcomes are, in figures for a report."""
    apart = {each.name: each.error for each in side_by_side(found, expected) if each.what == "gradient"}
    worst = max(apart, key=apart.__getitem__, default="")
    gradient = apart.get(worst, 0.0)
    loss = _gap(found.loss, expected.loss) / max(abs(expected.loss), 1e-12)
    return Errors(loss, gradient, worst if gradient else "")


def side_by_side(found: Outcome, expected: Outcome) -> Iterator[Difference]:
    """Yield each value of two outcomes, with how far it is apart."""
    gaps = [_gap(found.loss, expected.loss)]
    if len(found.losses) == len(expected.losses):
        gaps += map(_gap, found.losses, expected.losses)
    yield Difference("loss", "", max(gaps), abs(expected.loss), found.loss, expected.loss)
    scale = max(map(_size, expected.gradients.values()), default=0.0)
    for name in {**expected.gradients, **found.gradients}:
        one, two = found.gradients.get(name), expected.gradients.get(name)
        yield Difference("gradient", name, _apart(one, two), scale, _size(one), _size(two))
    for name, value in expected.buffers.items():
        one = found.buffers.get(name)
        if one is not None and one.shape == value.shape:  # else a cache that grows
            yield Difference("buffer", name, _apart(one, value), _size(value), _size(one), _size(value))
    for name, measured in expected.metrics.items() if found.metrics else ():
        mine = found.metrics[name]
        yield Difference("metric", name, _gap(mine, measured), abs(measured), mine, measured)


def differences(
    found: Outcome, expected: Outcome, tolerance: Tolerance, noise: Noise | None = None
) -> list[Difference]:
    """Values that differ by more than they may, the largest difference first.

    Args:
        found: of the sections.
        expected: of plain PyTorch.
        tolerance: what may differ anyway.
        noise: what may differ besides; None: nothing.
    """
    by_noise = noise or {}
    odd = [
        each
        for each in side_by_side(found, expected)
        if each.apart > max(tolerance.room(each), _TIMES_NOISE * by_noise.get((each.what, each.name), 0.0))
    ]
    return sorted(odd, key=lambda each: (each.what != "loss", not each.missing, -each.error))


def noise_of(expected: Outcome, moved: Iterable[Outcome]) -> Noise:
    """Measure how far ``moved`` outcomes are from the one whose parameters were not moved."""
    found: dict[tuple[What, str], float] = {}
    for outcome in moved:
        for each in side_by_side(outcome, expected):
            found[each.what, each.name] = max(each.apart, found.get((each.what, each.name), 0.0))
    return found


def _size(value: Tensor | None) -> float:
    """The largest finite absolute element."""
    if value is None or not value.numel():
        return 0.0
    value = value.detach()
    sizes = value.abs().float() if value.is_complex() else value.float().abs()  # truth values have none of their own
    return float(torch.nan_to_num(sizes, nan=0.0, posinf=0.0).max())


def _apart(one: Tensor | None, two: Tensor | None) -> float:
    """The largest difference of two elements; a missing tensor counts as zeros."""
    if one is None or two is None:
        return _size(one) + _size(two)
    if one.shape != two.shape:
        return math.inf
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        one, two = one.double(), two.double()
    if one.dtype != two.dtype:
        one = one.to(two.dtype)
    gaps = (one - two).abs()
    same = (one == two) | (one.isnan() & two.isnan())
    return float(torch.nan_to_num(gaps.masked_fill(same, 0.0), nan=math.inf, posinf=math.inf).max())


def _gap(one: float, two: float) -> float:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    gap = abs(one - two)
    return math.inf if math.isnan(gap) else gap
