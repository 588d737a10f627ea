"""Whether an event loop runs: code that blocks it is named, and silence meanwhile counts against no worker."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from varuna.process.console import warn
from varuna.process.frames import stacks_of

STOOD_STILL_S = 1.0
"""A loop that answers within this time is well."""
EVERY_S = 0.25
_PACKAGE = str(Path(__file__).parents[2])


class Watchdog:
    """Beside one event loop: ``start`` on the loop; the rest may be called by any thread.

    Args:
        say: hears who held the loop up, and for how long, on the watchdog's thread.
        clock: seconds.
        every_s: between two looks.
    """

    def __init__(
        self,
        say: Callable[[str], None] = warn,
        *,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ) -> None:
        self._say, self._clock, self._every_s = say, clock, every_s
        self._ran_s: float | None = None
        self._loop_thread = 0
        self._ended = threading.Event()
        self._standstill = Standstill()

    @property
    def ran_s(self) -> float | None:
        """The newest moment at which the loop ran; None before its start and after its end."""
        return None if self._ended.is_set() else self._ran_s

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the loop that runs this."""
        self._loop_thread = threading.get_ident()
        self._tick(loop)
        threading.Thread(target=self._watch, name="varuna-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the watch with the loop."""
        self._ended.set()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ran_s = self._clock()
        if not self._ended.is_set():
            loop.call_later(self._every_s, self._tick, loop)

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            ran_s = self._ran_s
            assert ran_s is not None
            if said := self._standstill.describe_last(ran_s, self._clock(), self._whereabouts):
                self._say(said)

    def _whereabouts(self) -> str:
        stacks = stacks_of([self._loop_thread])
        return whereabouts(stacks[0][0] if stacks else None)


class Standstill:
    """The standstill of a loop, as one look after the other finds it."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # since when the loop stands still
        self._culprit = ""

    def describe_last(self, ran_s: float, now_s: float, where: Callable[[], str]) -> str:
        """Say who held the loop up, and for how long, once it runs again; else nothing.

        The second look finds out who holds it up: at the first one the whole process may just have woken up.

        Args:
            ran_s: the newest moment at which the loop ran.
            now_s: of the look.
            where: finds out where the loop is.
        """
        if now_s - ran_s > STOOD_STILL_S:
            if self._since_s is None:
                self._since_s = ran_s
            elif not self._culprit:
                self._culprit = f"it was busy {where()}"
        elif self._since_s is not None:
            why = self._culprit or "its process stood still (stopped, suspended, or without a core to run on)"
            said = f"the server did not respond for {ran_s - self._since_s:.1f} s: {why}"
            self._since_s, self._culprit = None, ""
            return said
        return ""


def whereabouts(frame: FrameType | None) -> str:
    """The innermost function of this package on a stack, and what it called: ``in store/folder.py:40, write``."""
    if frame is None:
        return "somewhere"
    inner = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    ours = frame or inner
    where = f"in {Path(ours.f_code.co_filename).name}:{ours.f_lineno}, {ours.f_code.co_name}"
    return where if inner is ours else f"{where} ({Path(inner.f_code.co_filename).name}, {inner.f_code.co_name})"
