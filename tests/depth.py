"""The two depths of tests: ``make test``, for each change, and ``make nightly``, which sets NIGHTLY, for everything."""

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
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [row for value, each in rows for row in ([value] if value in fast else nightly_rows(each))]


def nightly(*cases: object) -> list[Any]:
    """Return parameters that only ``make nightly`` runs, of a test with one argument."""
    return nightly_rows(*((case,) for case in cases))


def nightly_rows(*rows: tuple[object, ...]) -> list[Any]:
    """Return parameters that only ``make nightly`` runs, of a test with several arguments."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]
