"""A worker's background threads, so that its process can wait for them before it ends.

A daemon thread that returns from C++ (torch, NCCL) into a finalising interpreter aborts the process: Python ends the
thread by unwinding its stack, which C++ does not allow (CPython issue 87135, until 3.14). So every thread of ours that
may be inside such a call is started here and has an owner that lets it end; ``join_all`` is the bound.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Self, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_started: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, name=f"varuna-{name}", daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def join_all(bound_s: float) -> None:
    """Wait up to ``bound_s`` in total for all threads to end; what they wait for must have been closed before."""
    deadline_s = time.monotonic() + bound_s
    for thread in list(_started):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))


class AbandoningThreadPool:
    """A few threads that work through a queue until the ``with`` block ends; waiting work is then dropped.

    ``ThreadPoolExecutor`` would hold the process's end up until the last read or write is through, which a bucket that
    does not answer delays by a quarter of an hour: meanwhile a rank that failed looks alive to all others.
    """

    def __init__(self, size: int, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [start(f"{name}-{number}", self._run) for number in range(size)]
        self._dropping = False

    def submit(self, work: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> Future[_T]:
        """Queue ``work``; the future has its result, or the exception that it raised."""
        future: Future[_T] = Future()

        def run() -> None:
            if self._dropping or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                future.set_result(work(*args, **named))
            except BaseException as error:  # noqa: BLE001 - for the thread that asks for the result
                future.set_exception(error)

        self._waiting.put(run)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *outcome: object) -> None:
        """Wait for the work that is running."""
        self._dropping = True
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
