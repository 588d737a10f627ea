"""The rest of a stage's state between two updates, in which other threads may read it."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StateGate:
    """Guards the state of one stage in one generation; the training thread changes it, others read.

    A read holds an update up, so it must be short.
    """

    def __init__(self, step: int | None) -> None:
        """Begin with a state that rests, and contains ``step`` steps; None: some of it is still to come."""
        self._changed = threading.Condition()
        self._step = step
        self._closed = False
        self._begun = self._ended = -1

    def note_begin(self, step: int) -> None:
        """Note that a step begins: until the state changes, no code of the user runs beside it."""
        with self._changed:
            self._begun = step

    def has_begun(self, step: int) -> bool:
        """Return whether that step has begun."""
        with self._changed:
            return self._begun == step

    def note_end(self, step: int) -> None:
        """Note that all that the step adds is there: it does not last any more, though the state rests."""
        with self._changed:
            self._ended = step
            self._changed.notify_all()

    def close_for_update(self) -> None:
        """Let no thread read from now on, since the state is about to change; wait for a read in progress."""
        with self._changed:
            self._step = None
            self._changed.notify_all()

    def open_at(self, step: int) -> None:
        """Let others read again: the state rests, and contains ``step`` steps."""
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_beyond(self, step: int) -> int | None:
        """Wait until the state rests at a step beyond this one; None: it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._step is not None and self._step > step))
            return None if self._closed else self._step

    def wait_while_in(self, step: int, bound_s: float) -> bool:
        """Wait ``bound_s`` while ``step`` lasts; return whether it still does, on top of a state that rests."""
        with self._changed:
            over = self._changed.wait_for(lambda: self._closed or self._step != step or self._ended == step, bound_s)
            return not over

    def read(self, step: int, look: Callable[[], T]) -> T | None:
        """Return what ``look`` returns, uninterrupted by updates; None: the state is not that of ``step`` any more."""
        with self._changed:
            return look() if self._step == step and not self._closed else None
