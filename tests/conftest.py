import os
import tempfile
from uuid import uuid4

import pytest
from hypothesis import settings

# What lands is judged by examples that anyone can run again; elsewhere hypothesis goes on looking for new ones.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test plans from what another, or the user's own runs, have measured; nothing is made unless it is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(tempfile.gettempdir(), f"varuna-tests-{uuid4().hex[:12]}"))
