"""Collects what a rank's steps took between two heartbeats."""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

from varuna.core.times import Carried, Compressed, RankTimes, Typical
from varuna.engine.pipeline.timeline import StepTimes

WARM_STEPS = 2
"""First steps of a generation, which are not reported: the optimizer builds its state, and caches are cold."""

STEPS_KEPT, TRANSFERS_KEPT = 1_000, 20_000
"""Most steps and transfers that are kept: without a manager they are never taken, and memory must not grow."""


class Reporter:
    """Filled by the training thread, emptied by the heartbeat's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._skip = WARM_STEPS
        self._steps: deque[tuple[float, StepTimes]] = deque(maxlen=STEPS_KEPT)
        self._messages: deque[tuple[float, float]] = deque(maxlen=TRANSFERS_KEPT)
        self._reductions: deque[tuple[int, float]] = deque(maxlen=TRANSFERS_KEPT)
        self._rounds_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._compressed = self._told_compressed = Compressed()
        self._relayed: tuple[int, ...] = ()

    def begin(self) -> None:
        """Begin a generation: drop what was under another plan."""
        with self._lock:
            self._skip = WARM_STEPS
            self._compressed = self._told_compressed = Compressed()
            self._clear()

    def pass_over(self) -> None:
        """Leave out the step that begins: it will not take what steps take."""
        with self._lock:
            self._skip = max(self._skip, 1)

    def add_times(
        self,
        times: StepTimes,
        *,
        step_s: float,
        messages: Sequence[tuple[float, float]],
        reductions: Sequence[tuple[int, float]],
        voters: int,
        compressed: Compressed,
        relayed: tuple[int, ...] = (),
    ) -> None:
        """Take the times of a step.

        Args:
            times: its actions, waits and phases.
            step_s: all of it.
            messages: bytes and seconds between here and the next stage, one way, of those that waited for no other.
            reductions: bytes and seconds of every all-reduce.
            voters: ranks whose all-reduce the vote is, in 2 (voters - 1) rounds.
            compressed: in this generation so far.
            relayed: ranks that are reached through another machine only.
        """
        with self._lock:
            if self._skip:
                self._skip -= 1
                self._compressed = self._told_compressed = compressed
                return
            self._compressed, self._relayed = compressed, relayed
            self._steps.append((step_s, times))
            self._messages += messages
            self._reductions += reductions
            if times.vote_s is not None and voters > 1:
                self._rounds_s.append(times.vote_s / (2 * (voters - 1)))

    def drain(self) -> RankTimes | None:
        """Take the times since the last call; None if no whole step was done."""
        with self._lock:
            if not self._steps:
                return None
            seconds: dict[str, list[float]] = {}
            for _, times in self._steps:
                for took in times.actions:
                    seconds.setdefault(took.kind, []).append(took.seconds)
            # Medians, but the fastest vote: others have waited for a late rank, and only the latency is wanted.
            told = RankTimes(
                steps=len(self._steps),
                step_s=median(step_s for step_s, _ in self._steps),
                waited_s=median(times.waited_s for _, times in self._steps),
                reduced_s=median(times.reduced_s for _, times in self._steps),
                actions={kind: Typical(len(values), median(values)) for kind, values in seconds.items()},
                messages=_carried(self._messages),
                reductions=_carried(self._reductions),
                round_s=min(self._rounds_s, default=None),
                compressed=self._compressed.plus(self._told_compressed, -1),
                relayed=self._relayed,
            )
            self._told_compressed = self._compressed
            self._clear()
            return told

    def _clear(self) -> None:
        for kept in (self._steps, self._messages, self._reductions, self._rounds_s):
            kept.clear()


def _carried(values: Collection[tuple[float, float]]) -> Carried | None:
    if not values:
        return None
    return Carried(len(values), median(size for size, _ in values), median(seconds for _, seconds in values))
