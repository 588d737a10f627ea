"""Drawn values for trying the user's functions: the same ones each time, and small."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varuna.data.randomness import derive_key

_EDGE = 8


def small(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape with at most eight elements in each dimension; equal ones stay equal."""
    return tuple(min(size, _EDGE) for size in shape)


def drawn(name: str, shape: Sequence[int], number: int = 0) -> Tensor:
    """Normal fp32 values, which follow from a name and a number."""
    generator = torch.Generator().manual_seed(derive_key(0, name, number))
    return torch.randn(tuple(shape), generator=generator)
