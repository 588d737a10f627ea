"""The engine's disposable threads, so that a process can wait for them before it ends.

A daemon thread that returns from C++ (gloo) into a finalising interpreter aborts the process.
"""

import threading
import time
import weakref
from collections.abc import Callable

_started: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start(name: str, target: Callable[[], None]) -> None:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, name=f"varuna-{name}", daemon=True)
    _started.add(thread)
    thread.start()


def join_all(bound_s: float) -> None:
    """Wait for all of them to end, ``bound_s`` in total; their groups have been abandoned before."""
    deadline_s = time.monotonic() + bound_s
    for thread in list(_started):
        thread.join(max(0.0, deadline_s - time.monotonic()))
