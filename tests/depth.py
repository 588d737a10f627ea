"""How deep tests go: what every change pays for (``make test``), or everything (``make nightly`` sets NIGHTLY)."""

import os
from collections.abc import Container, Iterable
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")

IS_NIGHTLY = bool(os.environ.get("NIGHTLY"))


def by_depth(fast: Value, nightly: Value) -> Value:
    """Return the number of seeds, steps or the like of this run's depth; a test of either depth asserts the same."""
    return nightly if IS_NIGHTLY else fast


def of_depth(values: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Return parameters of a test; those that are not among ``fast`` are left to the nightly run."""
    nightly = pytest.mark.nightly
    return [
        value if value in fast else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=nightly)
        for value in values
    ]
