import os
import sys
from collections.abc import Iterator

import pytest

from tests.captures import CAPTURES


@pytest.fixture(autouse=True)
def _one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep ranks that are threads on one core: to hand the interpreter over between cores costs as much as work.

    A thread that is woken there waits for its turn (SCHED_BATCH): a device thread of gloo's that displaces the thread
    which holds its lock would try to get it, without a pause, until the other one's next turn.
    """
    threaded = {"engine", "testing"} & {*request.path.parts}  # others start programs, which would share the core
    if not threaded or not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    allowed = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    os.sched_setaffinity(0, {sorted(allowed)[worker % len(allowed)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, allowed)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of tests are wrong for good, or for one look."""
    monkeypatch.setattr("varuna.checkpoint.again.AGAIN_S", 0.0)


@pytest.fixture(scope="session", autouse=True)
def _captures(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Workers of pytest share a folder: each has its own base below it."""
    base = tmp_path_factory.getbasetemp()
    CAPTURES.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "captures"


@pytest.fixture
def shared_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of these tests take over what another one has captured, as workers of a run do."""
    monkeypatch.setattr("varuna.job.shared_capture.manager", lambda: CAPTURES)


@pytest.fixture(autouse=True)
def _no_ranks_left() -> Iterator[None]:
    """End what a test started as threads of this process; tests that need no ranks import none of this."""
    yield
    if (ranks := sys.modules.get("tests.unit.engine.ranks")) is not None:
        ranks.close_sessions()
