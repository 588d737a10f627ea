"""Says once if training waits for samples, and how many processes would read them in time."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from varuna.process.console import say_once

WHILE_S, LONG_S = 2.0, 10.0
"""Reading is judged after this long, if there were several micro-batches, and after this long in any case."""
SEVERAL, FEW = 8, 3
"""Micro-batches that are several, and the fewest that are judged."""
WAITS = 0.1
"""Share of the time that training must wait for samples before anything is said."""
GAIN = 1.15
"""By how much a micro-batch must become faster."""
MOST = 16
"""Processes for one worker that are advised."""
_SHARE = 0.1
"""Of a processor, that a process gets even if all are busy."""
_ROOM = 2.0
"""Readers for each that would do if all reads took equally long."""


@dataclass(frozen=True)
class Pace:
    """The pace of reading and training on one worker over a while; all seconds are per micro-batch."""

    period_s: float
    waited_s: float
    """by the training thread, for samples"""
    read_s: float
    read_cpu_s: float
    """processor time of the thread that reads"""
    free_processors: float
    """on this machine, on average"""

    @property
    def is_slow(self) -> bool:
        """Whether training waits for samples."""
        return self.waited_s > WAITS * self.period_s

    @property
    def compute_s(self) -> float:
        """Seconds that are left if no sample is ever waited for."""
        return max(self.period_s - self.waited_s, 1e-6)

    def period_with(self, readers: float) -> float:
        """Predict a micro-batch's time with ``readers`` processes."""
        # What reading uses now, and what is free beside it: more processes than that only take turns.
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
    def advice(self) -> str:
        """Advice for a person, where training waits for samples."""
        seen = (
            f"training waits for samples {self.waited_s / self.period_s:.0%} of the time ({1000 * self.read_s:.0f} ms "
            f"to read a micro-batch, {1000 * self.compute_s:.0f} ms to compute one)"
        )
        if not (wanted := self.wanted):
            return (
                f"{seen}, and no processor is free: processes that read would not help. Make dataset[i] cheaper "
                "(decode or tokenise once, and keep the result), or use machines with more cores"
            )
        gain = self.period_s / self.period_with(wanted)
        return (
            f"{seen}: num_workers={wanted} would make a micro-batch about {gain:.1f} times as fast. The dataset must "
            "then open its files and connections in each process (docs/data.md#slow-samples)"
        )


class _Seen(NamedTuple):
    """Sums since reading began to be watched."""

    at_s: float
    idle_s: float
    waited_s: float
    micro_batches: int = 0
    read_s: float = 0.0
    read_cpu_s: float = 0.0


class SlowReading:
    """Watches the thread that reads until there is something to say.

    The reading thread calls ``took``, the training thread ``waited``.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._seen: _Seen | None = None
        self._has_told = False

    def waited(self, seconds: float) -> None:
        """Note that training has waited for samples."""
        self._waited_s += seconds

    def took(self, seconds: float, processor_s: float) -> None:
        """Note what reading one micro-batch took; judge every few seconds."""
        if self._has_told:
            return
        if self._seen is None:  # the first one may have imported, or opened files
            self._begin()
            return
        before = self._seen
        seen = self._seen = before._replace(
            micro_batches=before.micro_batches + 1,
            read_s=before.read_s + seconds,
            read_cpu_s=before.read_cpu_s + processor_s,
        )
        passed_s = time.monotonic() - seen.at_s
        if seen.micro_batches < (SEVERAL if passed_s < LONG_S else FEW) or passed_s < WHILE_S:
            return
        pace = Pace(
            period_s=passed_s / seen.micro_batches,
            waited_s=(self._waited_s - seen.waited_s) / seen.micro_batches,
            read_s=seen.read_s / seen.micro_batches,
            read_cpu_s=seen.read_cpu_s / seen.micro_batches,
            free_processors=(_idle_s() - seen.idle_s) / passed_s,
        )
        if pace.is_slow:
            say_once(pace.advice)
            self._has_told = True
        self._begin()

    def _begin(self) -> None:
        self._seen = _Seen(time.monotonic(), _idle_s(), self._waited_s)


def _idle_s() -> float:
    """Seconds that the machine's processors have had nothing to do, all together; 0 where the system does not count."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
