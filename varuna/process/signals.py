"""Ctrl-C and SIGTERM, turned into a call."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "Ctrl-C: stopping after the current step (with a checkpoint, if enabled). Press again to stop now."


def leave_termination_to_parent() -> None:
    """Ignore SIGTERM in this process, whose parent hears it too: Slurm tells all processes of a job at once.

    A script that handles it keeps its own way, and so do children of this process, which may be ended by it.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ignore)
    os.register_at_fork(after_in_child=restore)


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
