"""What goes wrong in a run, and when: at a named phase of a step on one rank."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from varuna.core.errors import UsageError
from varuna.engine.base.spans import Span, subscribe

Phase = Literal["form", "F", "R", "B", "I", "W", "reduce", "vote", "apply", "save"]
"""What a rank does in a step: forward, recompute, backward (or its halves I and W), and so on."""


class Killed(BaseException):
    """A worker ended here, as by SIGKILL: nothing may catch it."""


class Fault:
    """Something that happens once; see ``fail_at``. ``happened`` says whether it did."""

    def __init__(self, rank: int, step: int, phase: Phase, error: BaseException | None) -> None:
        self.rank, self.step, self.phase, self.error = rank, step, phase, error
        self.happened = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"fail_at(rank={self.rank}, step={self.step}, phase={self.phase!r})"

    def is_here(self, span: Span) -> bool:
        """Whether this is the place; once."""
        here = (span.phase, span.rank, span.step, span.name) == ("begin", self.rank, self.step, self.phase)
        with self._lock:
            if not here or self.happened:
                return False
            self.happened = True
        return True

    def hear(self, span: Span) -> None:
        """Raise, on the rank's own thread, if this is the place."""
        if self.is_here(span):
            raise Killed(str(self)) if self.error is None else self.error


def fail_at(*, rank: int, step: int, phase: Phase = "F", error: BaseException | None = None) -> Fault:
    """A worker is lost as it begins a phase of a step.

    Args:
        rank: of the worker, in the plan that runs by then.
        step: counted from 0, as in ``Step.step``.
        phase: ``"form"``, ``"F"``, ``"R"``, ``"B"``, ``"I"``, ``"W"``, ``"reduce"``, ``"vote"``, ``"apply"`` or
            ``"save"``. At ``form``, ``step`` is the first one of the new plan. Not every plan has every phase.
        error: raise this there instead: the worker's own code fails, which ends the run.

    Raises:
        UsageError: there is no such phase.
    """
    return Fault(rank, step, _checked(phase), error)


def _checked(phase: Phase) -> Phase:
    if phase not in get_args(Phase):
        raise UsageError(f"phase={phase!r} is not a phase of a step: use one of {', '.join(get_args(Phase))}")
    return phase


class Warned(Fault):
    """A notice that happens once; see ``notice_at``."""

    def __init__(self, rank: int, step: int, phase: Phase, seconds: float) -> None:
        super().__init__(rank, step, phase, None)
        self.seconds = seconds
        self.tell: Callable[[int, float], None] = lambda rank, seconds: None
        """set by whoever runs the workers"""

    def __str__(self) -> str:
        return f"notice_at(rank={self.rank}, step={self.step}, phase={self.phase!r})"

    def hear(self, span: Span) -> None:
        """Tell the manager, if this is the place."""
        if self.is_here(span):
            self.tell(self.rank, self.seconds)


def notice_at(*, rank: int, step: int, phase: Phase = "F", seconds: float = 0.0) -> Warned:
    """A worker's machine is said to go away, as the worker begins a phase of a step. Nobody takes it away.

    Args:
        rank: of the worker, in the plan that runs by then.
        step: counted from 0, as in ``Step.step``.
        phase: as for ``fail_at``.
        seconds: that it has left. If the step cannot end within them, it is broken off.

    Raises:
        UsageError: there is no such phase.
    """
    return Warned(rank, step, _checked(phase), seconds)


@contextmanager
def watching(faults: Sequence[Fault]) -> Iterator[None]:
    """Let them happen in here."""
    undos = [subscribe(fault.hear) for fault in faults]
    try:
        yield
    finally:
        for undo in undos:
            undo()
