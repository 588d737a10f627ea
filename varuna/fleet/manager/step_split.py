"""The split of a step's waits: for each second, whether the message was on its way, or not made yet.

A stage that has nothing to run waits for the message that its next action needs. From the moment at which the sender
had handed the message to its transport until it was here, whole, the wait counts as **transfer**; before that, and for
whatever else it lasted, it is **idle**. The simulator counts the same way (``simulator.trace.StageTimes``).

The sender's moments are by its own clock, so clocks are brought together first (``core.clock_alignment``): each
share may be off by as much as that leaves open, and where nothing links two clocks there is no share.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from varuna.core.clock_alignment import Alignment, align, receiver_of
from varuna.core.times import Interval, RankTimeline, StepTimeline


class WaitSplit(NamedTuple):
    """The waits of a step's stages, as means over the replicas."""

    transfer_s: tuple[float, ...]
    """By stage: while the message was on its way."""
    idle_s: tuple[float, ...]
    """By stage: for any other reason."""
    uncertain_s: float
    """Seconds by which a clock, and so the begin of a transfer, may be off; 0 where all ranks share one."""


def split_waits(timeline: StepTimeline) -> WaitSplit | None:
    """Split a step's waits into transfer and idle; None if a rank is missing or clocks cannot be brought together."""
    plan, alignment = timeline.plan, align(timeline)
    if len(timeline.ranks) < plan.workers or not math.isfinite(alignment.uncertain_s):
        return None
    made_s = _made(timeline, alignment)
    transfer_s, idle_s, alike = [0.0] * plan.stages, [0.0] * plan.stages, plan.kinds[0][0]
    for rank in timeline.ranks:
        replica, stage = plan.place_of(rank.rank)
        if replica not in alike:
            continue
        moved_s, waited_s = _waits(rank, made_s, rank.zero_s + alignment.added_s[rank.clock])
        transfer_s[stage] += moved_s / len(alike)
        idle_s[stage] += (waited_s - moved_s) / len(alike)
    return WaitSplit(tuple(transfer_s), tuple(idle_s), alignment.uncertain_s)


_Key = tuple[int, str, int]
"""Rank that gets a message, its kind, and its micro-batch."""


def _made(timeline: StepTimeline, alignment: Alignment) -> dict[_Key, float]:
    """Return when each message was handed to its transport, by the aligned clock."""
    found: dict[_Key, float] = {}
    for rank in timeline.ranks:
        add_s = rank.zero_s + alignment.added_s[rank.clock]
        for sent in rank.sent:
            found[receiver_of(timeline.plan, rank.rank, sent.kind), sent.kind, sent.micro_batch] = sent.begin_s + add_s
    return found


def _waits(rank: RankTimeline, made_s: dict[_Key, float], add_s: float) -> tuple[float, float]:
    """Seconds of a rank's waits in which a message was on its way, and of all its waits."""
    moved_s = waited_s = 0.0
    order = _Order(rank.actions, rank.came)
    for wait in rank.waits:
        waited_s += wait.seconds
        came = order.needed_after(wait)
        made = None if came is None else made_s.get((rank.rank, came.kind, came.micro_batch))
        if came is not None and made is not None:
            moved_s += max(0.0, min(wait.end_s, came.end_s) - max(wait.begin_s, made - add_s))
    return moved_s, waited_s


class _Order:
    """The messages for which a stage waited: each is that of the next action which needs one."""

    def __init__(self, actions: Sequence[Interval], came: Sequence[Interval]) -> None:
        self._actions, self._at = actions, 0
        self._came = {(each.kind, each.micro_batch): each for each in came}

    def needed_after(self, wait: Interval) -> Interval | None:
        """Find a wait's message, asked for in order. A recomputation is begun for the backward pass that follows it."""
        while self._at < len(self._actions) and self._actions[self._at].begin_s < wait.begin_s:
            self._at += 1
        following = self._actions[self._at] if self._at < len(self._actions) else None
        if following is None or following.kind == "W":
            return None
        return self._came.get(("activation" if following.kind == "F" else "gradient", following.micro_batch))
