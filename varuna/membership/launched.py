"""The launch of this process, and the report to its launcher when the script fails."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from varuna.core.errors import DeviceError, OtherSampleError, VarunaError
from varuna.engine.device.faults import fault_of, in_words
from varuna.process.scripts import LIBRARIES
from varuna.process.signals import leave_termination_to_parent
from varuna.process.threads import join_all

if TYPE_CHECKING:
    from varuna.membership.managed import ManagedMembership

_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *LIBRARIES,
    "<",
)
EXIT_BOUND_S = 5.0
"""Most seconds that the end of a process waits for its threads."""
failed = threading.Event()
"""The script is about to end with an exception."""


class WorkerThread:
    """A worker that is a thread among others of this process: see ``varuna.testing``.

    Args:
        membership: its own.
        captures: what all workers of the run have captured: see ``varuna.job.shared_capture``.
        turn: in it this worker captures a model, and no other one does.
    """

    def __init__(
        self, membership: "ManagedMembership", captures: list[Any], turn: AbstractContextManager[object]
    ) -> None:
        self.membership, self.captures, self.turn = membership, captures, turn
        self._closes: list[Callable[[], None]] = []

    def at_end(self, close: Callable[[], None]) -> None:
        """Call ``close`` when the thread ends."""
        self._closes.append(close)

    def leave(self) -> None:
        """The thread ends, or is made to: its waits end."""
        closes, self._closes = self._closes, []
        for close in closes:
            close()
        self.membership.close()


here: ContextVar[WorkerThread | None] = ContextVar("here", default=None)
"""Of the present thread, if it is such a worker."""


def manager() -> "ManagedMembership | None":
    """The manager's client under ``varuna run`` or an agent; None under torchrun and alone."""
    thread = here.get()
    return _manager_of_process() if thread is None else thread.membership


def capturing() -> AbstractContextManager[object]:
    """In this block a model is captured: threads of a process take turns in that."""
    thread = here.get()
    return nullcontext() if thread is None else thread.turn


def at_end(leave: Callable[[], None]) -> None:
    """Call ``leave`` when this process ends, or the thread, if it is a worker; then a process waits for its threads."""
    thread = here.get()
    if thread is None:
        _join_at_exit()
        atexit.register(leave)
    else:
        thread.at_end(leave)


@cache
def _join_at_exit() -> None:
    """Wait for all threads once all trainings have been left: none may outlive the process's main thread."""
    atexit.register(join_all, EXIT_BOUND_S)  # what is registered first runs last


@cache
def _manager_of_process() -> "ManagedMembership | None":
    if "VARUNA_MANAGER" not in os.environ:
        return None
    from varuna.membership.managed import from_environment

    if "VARUNA_INTERFACE" in os.environ:  # an agent started this process: it hears of the machine's end, and tells
        leave_termination_to_parent()
    return from_environment()


def watch_exceptions() -> None:
    """Tell the manager of an exception that ends this script; without one, print Varuna's errors without its frames."""
    if here.get() is None:  # an exception that ends a thread is the business of who started it
        _hook_exceptions()


@cache
def _hook_exceptions() -> None:
    previous, told = sys.excepthook, manager()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.set()
        fault = fault_of(error)
        if fault is not None and told is None:
            error.add_note(in_words(fault))
        if told is None and isinstance(error, VarunaError):
            print(explained(error), file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)  # first: whose device has failed is killed once the manager knows
        if told is not None:
            expected = isinstance(error, VarunaError)
            summary = str(error) if expected else f"{kind.__name__}: {error}"
            text = "" if expected else "".join(traceback.format_exception(kind, error, trace))
            accused = error.rank if isinstance(error, OtherSampleError) else None
            told.failed(summary, text, error.exit_code if isinstance(error, VarunaError) else 1, fault, accused)
        if isinstance(error, DeviceError):  # no call to a device that hangs returns, nor does the end of its context
            sys.stderr.flush()
            os._exit(error.exit_code)

    sys.excepthook = hook


def explained(error: VarunaError) -> str:
    """The message of an error, and the lines of the user's files that it came by: frames of libraries tell no more."""
    cause, frames = error.__cause__, traceback.extract_tb(error.__traceback__)
    if cause is not None and not isinstance(cause, VarunaError):
        frames = traceback.StackSummary.from_list([*frames, *traceback.extract_tb(cause.__traceback__)])
    own = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)]
    lines = dict.fromkeys(f"  {frame.filename}:{frame.lineno}: {frame.line}" for frame in own if frame.line)
    return "\n".join([f"varuna: {error}", *getattr(error, "__notes__", ()), *lines])
