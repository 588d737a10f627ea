from collections.abc import Iterator

import pytest

from tests.scenarios import warm

_LONGEST = (
    "test_kills.py",
    "test_launching.py",
    "test_planned.py",
    "test_cluster.py",
    "test_clouds.py",
    "test_ray.py",
    "test_weights.py",
    "test_partitions.py",
    "test_slurm.py",
    "test_bad_input.py",
    "test_object_stores.py",
    "test_page.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: at the end, one of them would run for minutes while a core idles."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


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
