"""A thread that works through what the manager must not wait for, in order."""

import queue
import threading
from collections.abc import Callable

from varuna.process.threads import start

Work = Callable[[], None]


class BackgroundWork:
    """Work of one kind, beside the manager's thread.

    Args:
        name: of the thread.
        fail: hears of an error that work did not deal with; called on that thread.
    """

    def __init__(self, name: str, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        start(name, self._run)

    def do(self, work: Work) -> None:
        """Put work at the end of the queue; returns at once."""
        self._queue.put(work)

    def wait_for(self, work: Work, bound_s: float) -> bool:
        """Do this after everything else, and wait until it is done; False if ``bound_s`` passes first."""
        done = threading.Event()

        def last() -> None:
            try:
                work()
            finally:
                done.set()

        self._queue.put(last)
        return done.wait(bound_s)

    def close(self) -> None:
        """Let the thread end after what it was given."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  ``fail`` decides
                self._fail(error)
