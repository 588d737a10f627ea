"""What each action of a step took on this rank, and what the rank waited for: facts for heartbeats and calibration."""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from varuna.schedule.actions import Action, Kind


class Took(NamedTuple):
    """One action, or one wait for what ``action`` needs; seconds of ``time.monotonic``."""

    action: Action
    """``micro_batch`` counts within the replica"""
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Length of the action in seconds."""
        return self.end_s - self.begin_s


class StepTimes(NamedTuple):
    """F's, R's, B's, I's and W's of one rank in one step, and its waits between them, each in order.

    Durations are those of the training thread: compute, packing and unpacking, but no wait for a peer.
    """

    step: int
    begin_s: float
    end_s: float
    actions: tuple[Took, ...]
    waits: tuple[Took, ...]

    def seconds_of(self, kind: Kind) -> list[float]:
        """Duration of each action of a kind, in order."""
        return [took.seconds for took in self.actions if took.action.kind is kind]

    def per_micro_batch_s(self) -> tuple[float, float]:
        """Compute of one micro-batch: medians of F, and of B with its R, since outliers do not matter."""
        backward: dict[int, float] = {}
        for action, begin_s, end_s in self.actions:
            if action.kind is not Kind.FORWARD:
                backward[action.micro_batch] = backward.get(action.micro_batch, 0.0) + end_s - begin_s
        return median(self.seconds_of(Kind.FORWARD) or [0.0]), median(backward.values() or [0.0])

    @property
    def compute_s(self) -> float:
        """Seconds of all actions together."""
        return _sum(self.actions)

    @property
    def waited_s(self) -> float:
        """Seconds of all waits together."""
        return _sum(self.waits)


def _sum(rows: Iterable[Took]) -> float:
    return sum(row.seconds for row in rows)
