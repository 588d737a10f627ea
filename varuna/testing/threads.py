"""Threads that are waited for together: the first error counts, and nothing waits for ever."""

import threading
import time
import traceback
from collections.abc import Callable, Iterable

from varuna.core.errors import WorkerError
from varuna.process.frames import stacks_of

_LOOK_S = 0.02


class Threads:
    """Threads of one run. They do not keep the process alive."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        """errors that threads have raised, the earliest first"""
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], object]) -> None:
        """Do ``work`` in a thread of its own."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - for the caller of join
                self.errors.append(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, bound_s: float) -> None:
        """Wait until all threads have ended, or one has raised: the others may wait for it.

        Raises:
            BaseException: the first error of a thread.
            WorkerError: a thread has not ended within ``bound_s``.
        """
        deadline_s = time.monotonic() + bound_s
        for thread in self._threads:
            while thread.is_alive() and not self.errors:
                thread.join(_LOOK_S)
                if thread.is_alive() and time.monotonic() > deadline_s:
                    raise WorkerError(
                        f"{thread.name} has not ended within {bound_s:g} s. It is here:\n{_place(thread)}"
                    )
        if self.errors:
            raise self.errors[0]


def run_all(works: Iterable[Callable[[], object]], bound_s: float = 60.0) -> None:
    """Do all works at once, each in a thread; see ``Threads.join``."""
    threads = Threads()
    for rank, work in enumerate(works):
        threads.start(f"rank {rank}", work)
    threads.join(bound_s)


def _place(thread: threading.Thread) -> str:
    """Return the innermost frames of a thread."""
    stacks = stacks_of([thread.ident or 0])
    return "".join(traceback.format_stack(stacks[0][0])[-3:]) if stacks else ""
