"""The newest steps of this worker, for people who ask what happened in one: kept as they are, told only on request."""

import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from varuna.core.messages import StepShown
from varuna.core.times import Interval, RankTimeline
from varuna.engine.links.transfer_time import TransferTime
from varuna.engine.pipeline.timeline import Messages, StepTimes

STEPS_KEPT = 32
ROWS_KEPT = 50_000
"""Actions and waits of all steps that are kept; the newest step is kept in any case."""
_WANTED = 64
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RanStep(NamedTuple):
    """A step of one rank."""

    generation: int
    rank: int
    times: StepTimes
    messages: Messages
    sums: tuple[TransferTime, ...]

    @property
    def rows(self) -> int:
        """Number of actions and waits to remember."""
        return len(self.times.actions) + len(self.times.waits)


class RecentSteps:
    """Filled by the training thread, asked by the membership's; a third one answers, so that neither has to.

    A message may be under way when its step ends, but not at the next heartbeat.
    """

    def __init__(self, tell: Callable[[StepShown], None], *, rows_kept: int = ROWS_KEPT) -> None:
        self._tell, self._lock, self._clock = tell, threading.Lock(), clock_name()
        self._rows_kept = rows_kept
        self._kept: deque[RanStep] = deque()
        self._rows = 0
        self._wanted: set[int] = set()

    def add_step(self, ran: RanStep) -> None:
        """Add a step that is over."""
        with self._lock:
            self._kept.append(ran)
            self._rows += ran.rows
            while len(self._kept) > 1 and (len(self._kept) > STEPS_KEPT or self._rows > self._rows_kept):
                self._rows -= self._kept.popleft().rows

    def request_step(self, step: int) -> None:
        """Note that a step was asked for, which may lie ahead; of very many such requests the first count."""
        with self._lock:
            if len(self._wanted) < _WANTED:
                self._wanted.add(step)

    def answer(self) -> None:
        """Tell what is wanted, as far as it is over."""
        if not self._wanted:
            return
        with self._lock:
            newest = self._kept[-1].times.step if self._kept else -1
            due = sorted(step for step in self._wanted if step <= newest)
            self._wanted.difference_update(due)
            found = {ran.times.step: ran for ran in self._kept}  # of a step that ran again, the last time
        for step in due:
            ran = found.get(step)
            self._tell(StepShown(step=step, timeline=None if ran is None else self._timeline(ran)))

    def _timeline(self, ran: RanStep) -> RankTimeline:
        times, zero_s = ran.times, ran.times.begin_s
        over_s = max([times.end_s, *(phase.end_s for phase in times.phases)])

        def since(time_s: float | None) -> float:
            return round((over_s if time_s is None else time_s) - zero_s, 6)

        def shown(rows: Iterable[Interval]) -> tuple[Interval, ...]:
            return tuple(
                row._replace(begin_s=since(row.begin_s), end_s=since(row.end_s), inside_s=round(row.inside_s, 6))
                for row in rows
            )

        def carried(kind: str, micro_batch: int, carry: TransferTime) -> Interval:
            return Interval(kind, micro_batch, since(carry.begin_s), since(carry.end_s), carry.size_bytes)

        travelled = (("activation", ran.messages.activations), ("gradient", ran.messages.gradients))
        return RankTimeline(
            generation=ran.generation,
            step=times.step,
            rank=ran.rank,
            clock=self._clock,
            zero_s=zero_s,
            micro_batches=ran.messages.micro_batches,
            actions=shown(times.actions),
            waits=shown(times.waits),
            ends=shown(times.phases),
            sent=tuple(carried(kind, *each) for kind, carries in travelled for each in carries),
            came=shown(ran.messages.arrivals),
            sums=tuple(carried("reduce", -1, carry) for carry in ran.sums),
        )


def clock_name() -> str:
    """Return a name that all processes share that share ``time.monotonic``: those of one start of a machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()
