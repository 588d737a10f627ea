"""Trial runs of a section on given arguments, forward and backward: to compare two ways of running it."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]
Seeded = Callable[[], AbstractContextManager[object]]


class SectionOutcome(NamedTuple):
    """The result of a trial run."""

    results: list[Tensor | None]
    gradients: list[Tensor | None]
    """of the arguments; None where there is none"""


def outcome(
    run: Run, arguments: Sequence[Any], seeded: Seeded, finish: Callable[[], None] = lambda: None
) -> SectionOutcome:
    """Run forward, and backward under varied gradients of the results.

    Args:
        run: the section.
        arguments: its own; their gradients are left alone.
        seeded: in force while the section runs.
        finish: called after the backward, before gradients are read.
    """
    fresh: dict[int, Any] = {}
    for argument in arguments:
        wants = isinstance(argument, Tensor) and argument.requires_grad
        fresh.setdefault(id(argument), argument.detach().requires_grad_() if wants else argument)
    given = [fresh[id(argument)] for argument in arguments]
    with torch.enable_grad(), seeded():
        made = run(*given)
    roots = [value for value in made if value.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_varied(value) for value in roots])
    finish()
    gradients = [value.grad if isinstance(value, Tensor) and value.requires_grad else None for value in given]
    return SectionOutcome([value.detach() for value in made], gradients)


def kind_of(argument: Any) -> Hashable:
    """Return what decides which kernels run on an argument."""
    if not isinstance(argument, Tensor):
        return type(argument).__name__
    return tuple(argument.shape), argument.stride(), argument.dtype, argument.device, argument.requires_grad


def _varied(value: Tensor) -> Tensor:
    """Make a gradient without structure that could hide a difference, the same at every call."""
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float32)
    return steps.mul_(0.7).add_(0.1).sin_().to(value.dtype).view(value.shape)
