"""Samples that a replay lost against an ideal run, by cause: the parts add up to the difference.

An ideal run is always on the best plan for the nodes that there are. In every moment what is missing from its rate has
one cause, or two; steps that run again are counted once they do.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class LostBy(StrEnum):
    """Reasons why samples are missing."""

    WARMING = "newcomers warming up"
    SPARES = "workers without a seat, or another plan than the fastest"
    NOTICING = "losses not noticed yet"
    REGROUPING = "stopping and forming groups"
    MOVING = "state and sums moving"
    LOADING = "checkpoints being read"
    SAVING = "stalls of checkpoints"
    COPYING = "copies of state and sums"
    BROKEN = "micro-batches run again, and pipelines filled again"
    UNDONE = "steps undone by rollbacks"
    UNFINISHED = "the step in flight at the end"


@dataclass(frozen=True, slots=True)
class OutageSpan:
    """Speed of a run for a while, and what makes it less than the ideal one."""

    why: LostBy
    """Cause of the samples that are missing while it trains too slowly, or not at all."""
    samples_per_s: float = 0.0
    copied_per_s: float = 0.0
    """Samples that it would train more, if no copies were made."""


class Account:
    """Sums up what is missing, between one change and the next.

    Args:
        samples_per_s: of the ideal run, by workers.
    """

    def __init__(self, samples_per_s: Callable[[int], float]) -> None:
        self._ideal = samples_per_s
        self._now_s = 0.0
        self._there = self._warm = 0
        self._doing = OutageSpan(LostBy.WARMING)
        self._lost: defaultdict[LostBy, float] = defaultdict(float)
        self._trained = 0.0

    def does(self, now_s: float, doing: OutageSpan) -> None:
        """Note what the run does from now on."""
        self._pass_to(now_s)
        self._doing = doing

    def workers(self, now_s: float, *, there: int = 0, warm: int = 0) -> None:
        """Add workers that are there, and those that could run at once."""
        self._pass_to(now_s)
        self._there += there
        self._warm += warm

    def note_vain(self, cause: LostBy, samples: float) -> None:
        """Note samples that were trained in vain."""
        self._lost[cause] += samples

    def closed(self, now_s: float, samples: int) -> Mapping[LostBy, float]:
        """Return the samples lost by cause.

        Args:
            now_s: the end.
            samples: that are committed.
        """
        self._pass_to(now_s)
        in_vain = self._trained - samples - self._lost[LostBy.UNDONE] - self._lost[LostBy.UNFINISHED]
        return {**self._lost, LostBy.BROKEN: in_vain}

    def _pass_to(self, now_s: float) -> None:
        passed_s, self._now_s = now_s - self._now_s, now_s
        if passed_s <= 0:
            return
        doing = self._doing
        missing = self._ideal(self._there) - doing.samples_per_s
        # each sample has one cause: newcomers first, then copies, and the rest is what the run does now
        warming = min(max(0.0, missing), self._ideal(self._there) - self._ideal(self._warm))
        copied = min(missing - warming, doing.copied_per_s)
        self._trained += doing.samples_per_s * passed_s
        self._lost[LostBy.WARMING] += warming * passed_s
        self._lost[LostBy.COPYING] += copied * passed_s
        self._lost[doing.why] += (missing - warming - copied) * passed_s
