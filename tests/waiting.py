"""The one way in which tests wait for something: they look until it is so, within a bound."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], bound_s: float = 100.0) -> None:
    """Poll with a bound, which a busy machine keeps too."""
    deadline_s = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {bound_s:g} s in vain"
        time.sleep(0.01)
