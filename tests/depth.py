"""The two depths of tests: ``make test``, for each change, and ``make nightly``, which sets NIGHTLY, for everything."""

import os
from typing import TypeVar

Value = TypeVar("Value")

IS_NIGHTLY = bool(os.environ.get("NIGHTLY"))


def by_depth(fast: Value, nightly: Value) -> Value:
    """Return the number of seeds, steps or the like of this run's depth; a test of either depth asserts the same."""
    return nightly if IS_NIGHTLY else fast
