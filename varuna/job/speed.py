"""Lines on the speed of a run that no manager watches: one now and then, and one at its end."""

import time
from collections import deque
from collections.abc import Callable

from varuna.core.units import counted, format_duration, format_rate, step_number, time_left
from varuna.process.console import say

_EVERY_S = 10.0
_RECENT_STEPS = 32


class SpeedLines:
    """Says where a run is, at most every ``every_s`` seconds.

    Args:
        total: steps of the whole run.
        before: says how many examples all steps before one have.
        tell: takes a line.
        every_s: between lines.
        clock: seconds.
    """

    def __init__(
        self,
        total: int,
        before: Callable[[int], int],
        *,
        tell: Callable[[str], None] = say,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._before = total, before
        self._tell, self._every_s, self._clock = tell, every_s, clock
        self._told_s = clock()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._first: tuple[int, float, float] | None = None  # step, seconds, loss
        self._newest: tuple[int, float, float] | None = None

    def add_step(self, step: int, loss: float) -> None:
        """Note a step that is over; the time from one to the next includes the script's own."""
        now_s = self._clock()
        self._newest = step, now_s, loss
        self._first = self._first or self._newest
        self._recent.append((step, now_s))
        if now_s - self._told_s < self._every_s or len(self._recent) < 2:
            return
        self._told_s = now_s
        (first, first_s), (last, last_s) = self._recent[0], self._recent[-1]
        step_s = (last_s - first_s) / (last - first)
        left = time_left(step_s * (self._total - 1 - step))
        self._tell(
            f"step {step_number(step, self._total)}  loss {loss:.4f}  {self._rate(first, last, last_s - first_s)}{left}"
        )

    def close(self) -> None:
        """Say how fast the run was since its first step, which had to wait for all that comes before."""
        if self._first is None or self._newest is None or self._first[0] == self._newest[0]:
            return
        (first, first_s, before), (last, last_s, after) = self._first, self._newest
        self._tell(
            f"{counted(last - first + 1, 'step')}, loss {before:.4f} to {after:.4f}; after the first one "
            f"{self._rate(first, last, last_s - first_s)}, {format_duration(last_s - first_s)}"
        )

    def _rate(self, first: int, last: int, seconds: float) -> str:
        examples = self._before(last + 1) - self._before(first + 1)
        return f"{format_rate(examples / max(seconds, 1e-9))} examples/s"
