"""Ctrl-C and SIGTERM, turned into a call."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "Ctrl-C: stopping after the current step (with a checkpoint, if enabled). Press again to stop now."


@contextmanager
def handled(call: Callable[[int], None]) -> Iterator[None]:
    """Call ``call`` with the number of each SIGINT and SIGTERM; only the main thread can, elsewhere nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        call(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
