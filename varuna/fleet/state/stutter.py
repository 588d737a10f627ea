"""Fail-stutter: a worker that is persistently slower than others at the same work (paper §"Varuna Manager"). Pure.

Each heartbeat that brings new compute times is compared with the median of the *other* replicas of its stage; where
there is one replica, with what the calibration predicts, relative to the other stages. Evidence adds up over beats:
noise of 10 % never suffices, 30 % does within about 20 beats (tests/unit/fleet/state/test_stutter.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

SLOW_RATIO = 1.3
"""Factor by which a worker must be slower to be left out: the 30 % that the paper saw."""
RECENT_BEATS = 8
"""So many tell what a worker usually takes; all of them have to be of the time in which it was slower, or faster."""
_ENOUGH = 1.05
_MOST = 0.5  # of one beat: a single hiccup, however long, proves nothing


@dataclass(frozen=True, slots=True)
class StutterEvidence:
    """Evidence from one worker's beats so far in this generation: a cumulative sum test on the log of its ratio.

    Each beat adds the log of its ratio less half of what is looked for; below zero the count starts anew. So noise
    drifts down, and slowness up: of 10 % noise, e^-14 of all excursions get this far.
    """

    score: float = 0.0
    log_ratios: float = 0.0
    """Their sum, and their number, since the score last was zero."""
    beats: int = 0

    def updated(self, ratio: float, slow_ratio: float) -> "StutterEvidence":
        """The evidence after one more beat."""
        found = max(-_MOST, min(_MOST, log(ratio)))
        score = self.score + found - log(slow_ratio) / 2
        return NO_EVIDENCE if score <= 0 else StutterEvidence(score, self.log_ratios + log(ratio), self.beats + 1)

    @property
    def is_conclusive(self) -> bool:
        """Whether the worker is slow for certain."""
        return self.score >= _ENOUGH

    @property
    def ratio(self) -> float:
        """Times that the worker takes as long as its peers, geometric mean."""
        return exp(self.log_ratios / self.beats) if self.beats else 1.0


NO_EVIDENCE = StutterEvidence()


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow worker, left out, if that is faster, until ``until_s``."""

    ratio: float
    until_s: float
    speed: float = 1.0
    """Speed that plans are told of it, the fastest one being 1."""

    def __str__(self) -> str:
        return f"{self.ratio:.2f} times the compute time of its peers"


def usual_s(recent_s: Sequence[float]) -> float:
    """The geometric mean of a worker's newest beats: seconds of compute for a micro-batch."""
    return exp(sum(map(log, recent_s)) / len(recent_s))


def slower_than_peers(compute_s: float, peers_s: Sequence[float]) -> float | None:
    """Return how many times longer a rank computes than its stage's other replicas; None without any to compare with.

    Args:
        compute_s: its newest seconds of compute per micro-batch, forward and backward, waiting left out.
        peers_s: theirs, ascending: of a thousand replicas only the middle is looked at.
    """
    count = len(peers_s)
    middle_s = (peers_s[(count - 1) // 2] + peers_s[count // 2]) / 2 if count else 0.0
    return compute_s / middle_s if middle_s > 0 else None


def slower_than_predicted(
    stage: int, compute_s: Mapping[int, float], expected_s: Sequence[float] | None
) -> float | None:
    """The same for the one pipeline that there is, relative to the other stages; None if it cannot be told.

    Args:
        stage: it must be in ``compute_s``.
        compute_s: by stage: newest seconds of compute per micro-batch.
        expected_s: by stage: what the calibration predicts for the same; None if nothing was measured.
    """
    if expected_s is None or min(expected_s) <= 0:
        return None
    others = [s / expected_s[other] for other, s in compute_s.items() if other != stage]
    # With two stages one other says nothing about who of both is off; the calibration was measured elsewhere.
    if len(others) < 2 or median(others) <= 0:
        return None
    return compute_s[stage] / expected_s[stage] / median(others)
