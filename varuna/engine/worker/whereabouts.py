"""The line of the user's code that a thread is running, seen from another thread, for reports of waits."""

import sysconfig
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from varuna.process.frames import stacks_of

_OWN = str(Path(__file__).parents[2])
_SKIPPED = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")
_SITE = "site-packages"
_READS = "varuna-loader"
_DEBUGGERS = ("pdb.py", "bdb.py", "debugpy", "pydevd", "IPython")
"""Parts of paths of debuggers: a debugged process may take any time."""


class Whereabouts(NamedTuple):
    """The place where a thread is."""

    place: str
    """``file:line`` of the user's code that runs; empty if none does"""
    is_debugged: bool
    frame: FrameType | None
    """the innermost one"""

    @property
    def stack(self) -> str:
        """The stack as text. Heartbeats do not ask for it, so that they read no source files."""
        return "" if self.frame is None else "".join(traceback.format_stack(self.frame))


def whereabouts(thread: int, *, reads: bool) -> Whereabouts:
    """Find the place of a training thread, or of the thread that reads samples for it.

    Args:
        thread: its identifier.
        reads: it waits for samples.
    """
    threads = [each.ident or 0 for each in threading.enumerate() if reads and each.name.startswith(_READS)]
    found = [_of(stack) for stack in stacks_of((*threads, thread))]
    return next((each for each in found if each.place), found[-1] if found else Whereabouts("", False, None))


def _of(stack: Sequence[FrameType]) -> Whereabouts:
    place, is_open, is_debugged = "", True, False
    for frame in stack:
        file = frame.f_code.co_filename
        is_debugged |= _debugs(file)
        is_open &= not file.startswith(_OWN)  # what called the engine does not run
        if not place and is_open and not _is_skipped(file):
            place = f"{file}:{frame.f_lineno}"
    return Whereabouts(place, is_debugged, stack[0])


@cache
def _debugs(file: str) -> bool:
    return not set(_DEBUGGERS).isdisjoint(Path(file).parts)


def _is_skipped(file: str) -> bool:
    return file.startswith(_SKIPPED) and _SITE not in file.removeprefix(_SKIPPED[0])
