"""Whether two outcomes of one computation differ by more than rounding.

A difference of a gradient is small if it is so beside that gradient, or beside rounding errors of the largest gradient
of the model: many a gradient is zero but for them (a bias in front of a softmax or a normalisation). What is not small
is compared with what plain PyTorch itself does when its parameters move by their last bit.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from varuna.checks.outcome import Outcome

_TIMES_NOISE = 30.0
"""A multiple of the noise: other sums round in other places than parameters moved by their last bit."""

What = Literal["loss", "gradient", "buffer", "metric"]


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that need no further look."""

    loss: float
    own: float
    """of a gradient or buffer, beside itself"""
    beside_all: float
    """of a gradient, beside the largest of the model"""


TOLERANCES = {
    torch.float32: Tolerance(loss=2e-6, own=2e-5, beside_all=1e-6),
    torch.float16: Tolerance(loss=2e-3, own=5e-3, beside_all=1e-4),
    torch.bfloat16: Tolerance(loss=1e-2, own=2e-2, beside_all=1e-3),
}


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The coarsest of the dtypes that a model computes in, which limits its results."""
    return max(dtypes, key=lambda each: torch.finfo(each).eps)


@dataclass(frozen=True)
class Difference:
    """A value that differs by more than it may."""

    what: What
    name: str
    """of the parameter, buffer or metric"""
    error: float
    """of a gradient: relative to the largest of the model; else to itself"""
    found: float
    expected: float
    """the loss or metric, or the largest element"""
    missing: bool = False
    """there is no gradient, or one of zeros, where there should be one"""


@dataclass(frozen=True)
class Noise:
    """Absolute differences between outcomes of plain PyTorch itself."""

    loss: float
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    metrics: Mapping[str, float]


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
    scale = largest(expected.gradients.values()) or 1.0
    names = {**expected.gradients, **found.gradients}
    apart = {name: _apart(found.gradients.get(name), expected.gradients.get(name)) / scale for name in names}
    worst = max(apart, key=apart.__getitem__, default="")
    gradient = apart.get(worst, 0.0)
    return Errors(_relative(found.loss, expected.loss), gradient, worst if gradient else "")


def differences(
    found: Outcome, expected: Outcome, tolerance: Tolerance, noise: Noise | None = None
) -> tuple[Difference, ...]:
    """Values that differ by more than they may, the largest difference first.

    Args:
        found: of the sections.
        expected: of plain PyTorch.
        tolerance: what may differ anyway.
        noise: what may differ besides; None: nothing.
    """
    odd: list[Difference] = []
    room = 0.0 if noise is None else _TIMES_NOISE * noise.loss
    apart = max((_gap(a, b) for a, b in zip(found.losses, expected.losses, strict=False)), default=0.0)
    apart = max(apart if len(found.losses) == len(expected.losses) else 0.0, _gap(found.loss, expected.loss))
    if apart > max(tolerance.loss * abs(expected.loss), room):
        odd.append(Difference("loss", "", _relative(found.loss, expected.loss), found.loss, expected.loss))
    scale = largest(expected.gradients.values())
    for name in {**expected.gradients, **found.gradients}:
        one, two = found.gradients.get(name), expected.gradients.get(name)
        own, other = _size(two), _size(one)
        missing = own > 0 and other == 0
        apart = _apart(one, two)
        room = 0.0 if noise is None else _TIMES_NOISE * noise.gradients.get(name, 0.0)
        small = tolerance.own * own if missing else max(tolerance.own * own, tolerance.beside_all * scale)
        if apart > max(small, room):
            odd.append(Difference("gradient", name, apart / (scale or 1.0), other, own, missing))
    for name, value in expected.buffers.items():
        one = found.buffers.get(name)
        if one is None or one.shape != value.shape:
            continue  # a cache that grows
        apart, own = _apart(one, value), _size(value)
        room = 0.0 if noise is None else _TIMES_NOISE * noise.buffers.get(name, 0.0)
        if apart > max(tolerance.own * own, room):
            odd.append(Difference("buffer", name, apart / (own or 1.0), _size(one), own))
    for name, measured in expected.metrics.items() if found.metrics else ():
        apart, mine = _gap(found.metrics[name], measured), found.metrics[name]
        room = 0.0 if noise is None else _TIMES_NOISE * noise.metrics.get(name, 0.0)
        if apart > max(tolerance.loss * abs(measured), room):
            odd.append(Difference("metric", name, _relative(mine, measured), mine, measured))
    return tuple(sorted(odd, key=lambda each: (each.what != "loss", not each.missing, -each.error)))


def noise_of(expected: Outcome, moved: Iterable[Outcome]) -> Noise:
    """Measure how far ``moved`` outcomes are from the one whose parameters were not moved."""
    outcomes = list(moved)
    losses = zip(*((each.loss, *each.losses) for each in (expected, *outcomes)), strict=False)  # by micro-batch
    return Noise(
        loss=max(_gap(each, of_it[0]) for of_it in losses for each in of_it),
        gradients={
            name: max(_apart(each.gradients.get(name), value) for each in outcomes)
            for name, value in expected.gradients.items()
        },
        buffers={
            name: max(_apart(each.buffers.get(name), value) for each in outcomes)
            for name, value in expected.buffers.items()
        },
        metrics={
            name: max(_gap(each.metrics.get(name, value), value) for each in outcomes)
            for name, value in expected.metrics.items()
        },
    )


def largest(tensors: Iterable[Tensor]) -> float:
    """Largest absolute value of all elements of all tensors."""
    return max(map(_size, tensors), default=0.0)


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


def _relative(found: float, expected: float) -> float:
    return _gap(found, expected) / max(abs(expected), 1e-12)
