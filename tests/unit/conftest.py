import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_ranks_left() -> Iterator[None]:
    """What a test started as threads of this process ends with it; tests that need no ranks import none of this."""
    yield
    if (ranks := sys.modules.get("tests.unit.engine.ranks")) is not None:
        ranks.close_sessions()
