import gc
import sys
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """What was imported stays: garbage collections need not look through all of torch again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_ranks_left() -> Iterator[None]:
    """What a test started as threads of this process ends with it; tests that need no ranks import none of this."""
    yield
    if (ranks := sys.modules.get("tests.unit.engine.ranks")) is not None:
        ranks.close_sessions()
