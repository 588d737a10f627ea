import pytest

from tests.unit.engine.conftest import one_thread
from varuna.planner import copies

__all__ = ["one_thread"]


@pytest.fixture
def as_in_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """State has a copy in every step, however short."""
    monkeypatch.setattr(copies, "LONG_STEP_S", 0.0)
