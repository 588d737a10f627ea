from collections.abc import Iterator

import pytest

from tests.unit.engine.ranks import single_threaded


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks and the plain loops that they are compared with compute with one thread each, as launched workers do."""
    with single_threaded():
        yield
