"""Faults in a run, each at a named phase of a step on one rank."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from varuna.core.errors import UsageError
from varuna.engine.base.spans import Span, subscribe
from varuna.membership.launched import here

Phase = Literal[
    "form", "F", "R", "B", "I", "W", "send", "reduce", "sum", "tied", "vote", "apply", "save",
    "keep", "send-kept", "copy-sum", "kept", "kept-sum",
    "hold", "held", "move", "barrier", "send-rest", "take-rest",
]  # fmt: skip
"""A phase of a rank's step: forward, recompute, backward (or its halves I and W), and so on."""


class Killed(BaseException):
    """A worker ended here, as by SIGKILL: nothing may catch it."""


class Fault:
    """Something that happens once; see ``fail_at``. ``happened`` says whether it did."""

    def __init__(
        self, rank: int, step: int, phase: Phase, error: BaseException | None, *, after: int = 0, at_end: bool = False
    ) -> None:
        self.rank, self.step, self.phase, self.error = rank, step, phase, error
        self.happened = False
        self._mark, self._left = "end" if at_end else "begin", after
        self._lock = threading.Lock()
        self.lose: Callable[[int], None] = lambda rank: None
        """ends the worker of a rank, from another thread than its own; set by the code that runs the workers"""

    def __str__(self) -> str:
        return f"fail_at(rank={self.rank}, step={self.step}, phase={self.phase!r})"

    def is_here(self, span: Span) -> bool:
        """Return whether this is the place; True once."""
        here = (span.phase, span.rank, span.step, span.name) == (self._mark, self.rank, self.step, self.phase)
        with self._lock:
            if not here or self.happened:
                return False
            self._left -= 1
            self.happened = self._left < 0
            return self.happened

    def on_span(self, span: Span) -> None:
        """Raise, or end the rank whose other thread this is, if this is the place."""
        if not self.is_here(span):
            return
        if self.error is not None:
            raise self.error
        if here.get() is not None:
            raise Killed(str(self))
        self.lose(self.rank)


def fail_at(
    *,
    rank: int,
    step: int,
    phase: Phase = "F",
    after: int = 0,
    at_end: bool = False,
    error: BaseException | None = None,
) -> Fault:
    """Lose a worker as it begins a phase of a step.

    Args:
        rank: of the worker, in the plan that runs by then.
        step: counted from 0, as in ``Step.step``.
        phase: such as ``"F"``, ``"B"``, ``"vote"`` or ``"form"``: docs/testing.md has all of them, and not every plan.
            At ``form``, ``step`` is the first one of the new plan.
        after: times that the phase passes in that step before.
        at_end: as it ends the phase, not as it begins it.
        error: raise this there instead: the worker's own code fails, which ends the run.

    Raises:
        UsageError: there is no such phase.
    """
    return Fault(rank, step, _checked(phase), error, after=after, at_end=at_end)


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
        self.wait: Callable[[], None] = lambda: None
        """for the manager to plan without the rank; both are set by the code that runs the workers"""

    def __str__(self) -> str:
        return f"notice_at(rank={self.rank}, step={self.step}, phase={self.phase!r})"

    def on_span(self, span: Span) -> None:
        """Tell the manager, if this is the place, and wait until it has a plan: the steps of a test are short."""
        if self.is_here(span):
            self.tell(self.rank, self.seconds)
            self.wait()


def notice_at(*, rank: int, step: int, phase: Phase = "F", seconds: float = 0.0) -> Warned:
    """Give notice that a worker's machine will go away, as it begins a phase of a step; the machine stays.

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
    """Let faults happen in this block."""
    undos = [subscribe(fault.on_span) for fault in faults]
    try:
        yield
    finally:
        for undo in undos:
            undo()
