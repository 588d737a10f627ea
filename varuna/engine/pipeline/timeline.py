"""The timeline of a rank in a step: the one record behind heartbeats, calibration and pictures of steps."""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from varuna.core.times import Interval
from varuna.engine.links.transfer_time import TransferTime
from varuna.schedule.actions import Action, Kind


def interval_of(action: Action, begin_s: float, end_s: float, inside_s: float = 0.0) -> Interval:
    """Return the interval in which an action was done, or waited for; seconds of ``time.monotonic``."""
    return Interval(action.kind.value, action.micro_batch, begin_s, end_s, inside_s=inside_s)


class Messages(NamedTuple):
    """Messages that one rank sent and got in a step, each with its micro-batch, by the number within the replica."""

    micro_batches: tuple[int, ...]
    """numbers within the global batch, by those within the replica"""
    activations: Sequence[tuple[int, TransferTime]]
    gradients: Sequence[tuple[int, TransferTime]]
    arrivals: Sequence[Interval] = ()


class StepTimes(NamedTuple):
    """F's, R's, B's, I's and W's of one rank in one step, and its waits between them, each in order.

    Durations are those of the training thread: compute, packing and unpacking, but no wait for a peer.
    """

    step: int
    begin_s: float
    end_s: float
    actions: tuple[Interval, ...]
    waits: tuple[Interval, ...]
    phases: tuple[Interval, ...] = ()
    """doings of the training thread after the last action, in order; once the step is applied"""

    def seconds_of(self, kind: Kind) -> list[float]:
        """Duration of each action of a kind, in order."""
        return [took.seconds for took in self.actions if took.kind == kind.value]

    def per_micro_batch_s(self) -> tuple[float, float]:
        """Compute of one micro-batch: medians of F, and of B with its R, since outliers do not matter."""
        backward: dict[int, float] = {}
        for took in self.actions:
            if took.kind != Kind.FORWARD.value:
                backward[took.micro_batch] = backward.get(took.micro_batch, 0.0) + took.seconds
        return median(self.seconds_of(Kind.FORWARD) or [0.0]), median(backward.values() or [0.0])

    @property
    def compute_s(self) -> float:
        """Seconds of all actions together."""
        return _sum(self.actions)

    @property
    def reduced_s(self) -> float:
        """Seconds from the last action until all gradients were reduced."""
        return next((phase.end_s - self.end_s for phase in self.phases if phase.kind == "reduce"), 0.0)

    @property
    def vote_s(self) -> float | None:
        """Seconds of the vote; None if there was none."""
        return next((phase.seconds for phase in self.phases if phase.kind == "vote"), None)

    @property
    def waited_s(self) -> float:
        """Seconds of all waits together."""
        return _sum(self.waits)


def _sum(rows: Iterable[Interval]) -> float:
    return sum(row.seconds for row in rows)


def taken(arrivals: deque[tuple[Hashable, float]], step: int, mine: Sequence[int]) -> list[Interval]:
    """Remove a step's arrivals from those of a receiver, whose keys are of a kind, a step and a micro-batch.

    Those of the next step, which the sender may have begun, stay. ``mine`` are the step's micro-batches of this rank.
    """
    local, found = {micro_batch: at for at, micro_batch in enumerate(mine)}, []
    while arrivals:
        key, at_s = arrivals[0]
        assert isinstance(key, tuple)
        kind, of, micro_batch = key
        if of > step:
            break
        arrivals.popleft()
        if of == step and micro_batch in local:
            found.append(Interval(kind, local[micro_batch], at_s, at_s))
    return found
