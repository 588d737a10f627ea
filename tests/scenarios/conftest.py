import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.scenarios import warm
from tests.scenarios.launch import Alone, losses_alone
from varuna.job.model_config import Configured
from varuna.job.shared_capture import is_same
from varuna.partition.model import PartitionedModel

_LONGEST = (
    "test_partitions.py",
    "test_kills.py",
    "test_cluster.py",
    "test_launching.py",
    "test_planned.py",
    "test_clouds.py",
    "test_ray.py",
    "test_slurm.py",
    "test_page.py",
    "test_stopped.py",
    "test_torchrun.py",
    "test_bad_input.py",
    "test_object_stores.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: at the end, one of them would run for minutes while a core idles."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    yield
    warm.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """``alone(steps, *options)``: losses of ``job.py`` in one process, computed once for all tests of a session."""
    own = tmp_path_factory.getbasetemp()
    return partial(losses_alone, own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="module")
def one_capture() -> Iterator[None]:
    """Trainers of this process that are given the same model capture it once, which takes most of their time."""
    found: list[tuple[object, Configured, PartitionedModel]] = []

    def captured(
        given: object, capture: Callable[[], PartitionedModel], *, built: Configured, key: object
    ) -> PartitionedModel:
        for known, configured, model in found:
            if is_same(known, given):
                built.json, built.has_adapters = configured.json, configured.has_adapters
                return model
        found.append((given, built, capture()))
        return found[-1][2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("varuna.job.spec.captured_once", captured)
        yield


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of the test starts as a user's does."""
    monkeypatch.setenv(warm.COLD, "1")


@pytest.fixture
def warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that this process itself starts are forked from the nursery."""
    monkeypatch.setattr("subprocess.Popen", warm.Process)
