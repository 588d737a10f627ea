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
        """The state rests, and contains ``step`` steps; None: some of it is still to come."""
        self._changed = threading.Condition()
        self._step = step
        self._closed = False
        self._begun = self._ended = -1

    def begins(self, step: int) -> None:
        """The step on top of the state begins: until the state changes, no code of the user runs beside it."""
        with self._changed:
            self._begun = step

    def has_begun(self, step: int) -> bool:
        """Whether that step has begun."""
        with self._changed:
            return self._begun == step

    def ends(self, step: int) -> None:
        """All that the step adds on top of the state is there: it does not last any more, though the state rests."""
        with self._changed:
            self._ended = step
            self._changed.notify_all()

    def changes(self) -> None:
        """The state is about to change; waits for a read in progress."""
        with self._changed:
            self._step = None
            self._changed.notify_all()

    def rests(self, step: int) -> None:
        """The state rests again, and contains ``step`` steps."""
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_beyond(self, step: int) -> int | None:
        """Wait until the state rests at a step beyond this one; None: it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._step is not None and self._step > step))
            return None if self._closed else self._step

    def lasts(self, step: int, bound_s: float) -> bool:
        """Wait for so long; whether ``step`` has then not ended, and the state that it is on top of still rests."""
        with self._changed:
            over = self._changed.wait_for(lambda: self._closed or self._step != step or self._ended == step, bound_s)
            return not over

    def read(self, step: int, look: Callable[[], T]) -> T | None:
        """Return what ``look`` returns, uninterrupted by updates; None: the state is not that of ``step`` any more."""
        with self._changed:
            return look() if self._step == step and not self._closed else None
