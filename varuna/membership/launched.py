"""How this process was started, and what its launcher must hear when the script fails."""

import os
import sys
import threading
import traceback
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from varuna.core.errors import VarunaError

if TYPE_CHECKING:
    from varuna.membership.managed import ManagedMembership

failed = threading.Event()
"""The script is about to end with an exception."""


@cache
def manager() -> "ManagedMembership | None":
    """The manager's client under ``varuna run`` or an agent; None under torchrun and alone."""
    if "VARUNA_MANAGER" not in os.environ:
        return None
    from varuna.membership.managed import from_environment

    return from_environment()


@cache
def watch_exceptions() -> None:
    """Tell the manager of an exception that ends this script, before Python prints it."""
    previous, told = sys.excepthook, manager()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.set()
        if told is not None:
            expected = isinstance(error, VarunaError)
            summary = str(error) if expected else f"{kind.__name__}: {error}"
            text = "" if expected else "".join(traceback.format_exception(kind, error, trace))
            told.failed(summary, text, error.exit_code if isinstance(error, VarunaError) else 1)
        previous(kind, error, trace)

    sys.excepthook = hook
