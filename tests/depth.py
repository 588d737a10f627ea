"""How deep tests go: what every change pays for (``make test``), or everything (``make nightly`` sets NIGHTLY)."""

import os
from typing import TypeVar

Value = TypeVar("Value")

IS_NIGHTLY = bool(os.environ.get("NIGHTLY"))


def by_depth(fast: Value, nightly: Value) -> Value:
    """Return the number of seeds, steps or the like of this run's depth; a test of either depth asserts the same."""
    return nightly if IS_NIGHTLY else fast
