"""How many processes should read, by what a while of reading and training looked like: pure."""

import math
from dataclasses import dataclass

MOST = 16
"""Processes of one worker that are started without being asked for."""
WAITS = 0.1
"""Share of the time that training must wait for samples before anything is done about it."""
GAIN = 1.15
"""By how much a micro-batch must become faster."""
_SHARE = 0.1
"""Of a processor, that a process gets even if all are busy."""
_ROOM = 2.0
"""Readers for each that would do if all reads took equally long."""


@dataclass(frozen=True)
class Pace:
    """A while on one worker; all seconds are per micro-batch."""

    period_s: float
    waited_s: float
    """by the training thread, for samples"""
    read_s: float
    """by one reader: this process's thread, or another process"""
    read_cpu_s: float
    """processor time of that reader"""
    free_processors: float
    """on this machine, on average"""

    @property
    def is_slow(self) -> bool:
        """Training waits for samples."""
        return self.waited_s > WAITS * self.period_s

    @property
    def compute_s(self) -> float:
        """What is left if no sample is ever waited for."""
        return max(self.period_s - self.waited_s, 1e-6)

    def period_with(self, readers: float) -> float:
        """What a micro-batch would take with so many processes that read."""
        processors = self.read_cpu_s / self.period_s + max(self.free_processors, _SHARE)
        return max(self.compute_s, self.read_s / readers, self.read_cpu_s / processors)

    @property
    def wanted(self) -> int:
        """The number of processes that is worth having; 0: none would bring enough."""
        best_s = self.period_with(MOST)
        if self.period_s < GAIN * best_s:
            return 0
        return min(MOST, math.ceil(_ROOM * self.read_s / best_s))

    @property
    def gain(self) -> float:
        """How many times as fast a micro-batch would be with that many."""
        return self.period_s / self.period_with(self.wanted) if self.wanted else 1.0

    def __str__(self) -> str:
        return (
            f"training waits for samples {self.waited_s / self.period_s:.0%} of the time ({1000 * self.read_s:.0f} ms "
            f"to read a micro-batch, {1000 * self.compute_s:.0f} ms to compute one)"
        )
