"""A worker's background threads, so that its process can wait for them before it ends.

A daemon thread that returns from C++ (torch, gloo) into a finalising interpreter aborts the process: Python ends the
thread by unwinding its stack, which C++ does not allow (CPython issue 87135, until 3.14). So every thread of ours that
may be inside such a call is started here and has an owner that lets it end; ``join_all`` is the bound.
"""

import threading
import time
import weakref
from collections.abc import Callable

_started: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, name=f"varuna-{name}", daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def join_all(bound_s: float) -> None:
    """Wait for all of them to end, ``bound_s`` in total; what they wait for has been closed before."""
    deadline_s = time.monotonic() + bound_s
    for thread in list(_started):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))
