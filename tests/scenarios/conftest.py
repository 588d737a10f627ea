from collections.abc import Iterator

import pytest

from tests.scenarios import warm


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    yield
    warm.close()


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of the test starts as a user's does."""
    monkeypatch.setenv(warm.COLD, "1")


@pytest.fixture
def warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that this process itself starts are forked from the nursery."""
    monkeypatch.setattr("subprocess.Popen", warm.Process)
