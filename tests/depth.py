"""How deep tests go: what a change pays for (``make test``), or everything (``make nightly``, which sets NIGHTLY)."""

import os
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")

IS_NIGHTLY = bool(os.environ.get("NIGHTLY"))


def by_depth(fast: Value, nightly: Value) -> Value:
    """Return the number of seeds, steps or the like of this run's depth; a test of either depth asserts the same."""
    return nightly if IS_NIGHTLY else fast


def nightly(*cases: object) -> list[Any]:
    """Return parameters that only ``make nightly`` runs, of a test with one argument."""
    return nightly_rows(*((case,) for case in cases))


def nightly_rows(*rows: tuple[object, ...]) -> list[Any]:
    """Return parameters that only ``make nightly`` runs, of a test with several arguments."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]
