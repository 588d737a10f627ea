"""Functions of the user's that remember what they returned."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna.partition.watching.fake_mode import FakeMode
from varuna.partition.watching.user_caches import without_fakes


@functools.lru_cache(maxsize=2)
def table(length: int) -> Tensor:
    return torch.arange(length)


@functools.cache
def tables(length: int) -> dict[str, Any]:
    return {"rows": [torch.arange(length)]}


class Rope(nn.Module):
    """Remembers a table, as DINOv3 does."""

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def table(length: int) -> Tensor:
        return torch.arange(length)


@functools.lru_cache(maxsize=2)
def double(length: int) -> int:
    return 2 * length


@pytest.mark.parametrize("cached", [table, tables, Rope.table])
def test_tensors_without_data_are_forgotten(cached: Callable[[int], Any]) -> None:
    with without_fakes(), FakeMode():
        cached(3)
        double(3)

    assert cached.cache_info().currsize == 0  # type: ignore[attr-defined]
    assert double.cache_info().currsize > 0


@pytest.mark.parametrize("cached", [table, tables])
def test_values_stay(cached: Callable[[int], Any]) -> None:
    cached(5)
    with without_fakes():
        cached(6)

    assert cached.cache_info().currsize == 2  # type: ignore[attr-defined]
    cached.cache_clear()  # type: ignore[attr-defined]
