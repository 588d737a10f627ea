import gc
import os
import tempfile
from collections.abc import Iterator
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import IS_NIGHTLY, by_depth

# As in workers, and before torch is imported: ranks are threads here, and how many threads an operation uses is part of
# its bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor does a test spend seconds on measuring, and plan from what a busy machine took: those that want to unset it.
os.environ["VARUNA_CALIBRATION"] = "none"

# No test is timed: the machine may be busy. What lands is judged by examples that anyone can run again; elsewhere
# hypothesis goes on looking for new ones.
EXAMPLES = by_depth(20, 100)
settings.register_profile("here", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is marked ``nightly`` to ``make nightly``."""
    if IS_NIGHTLY:
        return
    later = [item for item in items if item.get_closest_marker("nightly")]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """Freeze what was imported: garbage collections need not look through all of torch again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 20)  # an export alone makes 100,000 objects, of which nearly all go by themselves
    gc.enable()


def pytest_sessionfinish() -> None:
    """Pytest looks for errors of finalizers five times; once is enough, and what is then left stays."""
    gc.collect()
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker of ``-n auto`` more than there are cores: some tests wait for sockets and processes."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give tests, and the processes that they start, a temporary folder of pytest's, which goes with the others."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, _own_temporary_folder: None) -> None:
    """No test plans from what another, or the user's own runs, have measured; nothing is made unless it is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(tempfile.gettempdir(), f"cache-{uuid4().hex[:12]}"))
