"""Trying the user's functions on drawn values: the same ones each time, and small."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from varuna.core.errors import VarunaError
from varuna.data.randomness import derive_key

_EDGE = 8
_T = TypeVar("_T")


def small(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape with at most eight elements in each dimension; equal ones stay equal."""
    return tuple(min(size, _EDGE) for size in shape)


def drawn(name: str, shape: Sequence[int], number: int = 0) -> Tensor:
    """Normal fp32 values, which follow from a name and a number."""
    generator = torch.Generator().manual_seed(derive_key(0, name, number))
    return torch.randn(tuple(shape), generator=generator)


def tried(run: Callable[[], _T]) -> _T | None:
    """Return what ``run`` does; None if it fails, as code does that needs the model's own values, shapes or device.

    Raises:
        VarunaError: it refuses something.
    """
    try:
        return run()
    except VarunaError:
        raise
    except Exception:  # noqa: BLE001 - whatever the user's code raises; training will say more
        return None
