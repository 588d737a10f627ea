"""How fast copies are made, and when one is not worth trying. Pure.

Copies share links and processors with the training. So they pause after each part, and a worker whose copies do not get
ready in time makes them less often. The engine makes them by these rules, the planner prices them, and a replay models
them.
"""

from math import inf
from typing import NamedTuple

from varuna.core.saved import young_s

LINK_SHARE = 0.5
"""Of a link's time, at most, goes to copies."""
HURRY = 0.02
"""Of a step: for so long the copy of its state makes no pauses. Until it is complete, its owner alone has what it has
applied."""
LONGEST = 0.1
"""Of a step, that a copy may take: until it is complete, the loss of its owner is what it is without copies."""
PROCESSOR_S_PER_BYTE = 1.9e-9
"""Of a worker that sends copies and keeps as many of another's (``benchmarks.copy_cost``, 24 November 2026). Where
processors do not train, as beside GPUs, it is more than a copy can cost."""
LAST_SHARE = 0.005
"""Of a step, that its vote may wait for the last copies of its sums: from them and the copy of its state, the update of
a worker that is lost can be made again."""
_LEAST_LAST_S = 0.05
"""Sections are announced and taken one by one."""
_SUMS_EVERY_S, _SUMS_SHARE = 5.0, 0.02
"""Seconds between copies of a step's sums of gradients, at least, and the share of time that making them may take."""
LONGEST_PAUSE_S = 1.0
CHECKPOINT_S, CHECKPOINT_SHARE = 2e-3, 0.01
"""What a memory checkpoint takes, however small the state is, and the share of time that making them may take."""
SHORT_S = 0.25
"""A copy may take so long, however short a step is."""
_TOO_LATE, _MOST_SKIPPED = 3, 64


def pause_s(part_s: float) -> float:
    """How long to pause after a part that took ``part_s``, so that copies take their share of a link's time."""
    return min(LONGEST_PAUSE_S, part_s * (1 / LINK_SHARE - 1))


def copying_s(size_bytes: float, link_bytes_per_s: float) -> float:
    """How long copies of so many bytes are under way, with the pauses between their parts."""
    return size_bytes / (link_bytes_per_s * LINK_SHARE)


def state_pause_s(part_s: float, since_s: float, step_s: float) -> float:
    """``pause_s`` after a part of a state's copy, which began ``since_s`` ago, in a step of ``step_s``."""
    return 0.0 if since_s < HURRY * step_s else pause_s(part_s)


def state_copying_s(size_bytes: float, link_bytes_per_s: float, step_s: float) -> float:
    """How long the copy of a state of so many bytes is under way in a step of ``step_s``."""
    hurried_bytes = min(size_bytes, link_bytes_per_s * HURRY * step_s)
    return hurried_bytes / link_bytes_per_s + copying_s(size_bytes - hurried_bytes, link_bytes_per_s)


def last_sums_s(size_bytes: float, link_bytes_per_s: float, step_s: float) -> float:
    """How long the vote on a step of ``step_s`` waits for the last copies of sums of so many bytes; 0: it does not.

    In a short step no more is lost than that step and what came since a checkpoint.
    """
    wait_s = max(_LEAST_LAST_S, size_bytes / link_bytes_per_s if size_bytes else 0.0)
    return wait_s if wait_s <= LAST_SHARE * step_s else 0.0


class SumsPace(NamedTuple):
    """When a step's sums are copied: all of them, one section after another, in each of some rounds."""

    rounds: int
    """none: the step is too short"""
    every_s: float
    """from the begin of one to that of the next, and before the first"""


def sums_pace(left_s: float, size_bytes: int, round_s: float) -> SumsPace:
    """The pace for what is left of a step.

    What they cost is their processor time, and no more than all of the time that they take: on a slow link, that is
    mostly waiting. As many as their share of the time allows divide the step equally: copied early, there is little in
    the sums, and copied late, little is left that could be lost.

    Args:
        left_s: how long it takes from now on.
        size_bytes: of all sums.
        round_s: how long one round takes.
    """
    cost_s = min(round_s, PROCESSOR_S_PER_BYTE * size_bytes)
    least_s = max(_SUMS_EVERY_S, 2 * round_s)
    rounds = int(left_s / least_s) - 1
    if cost_s:
        rounds = min(rounds, int(left_s * _SUMS_SHARE / cost_s))
    if rounds < 1:
        return SumsPace(0, max(least_s, cost_s / _SUMS_SHARE))
    return SumsPace(rounds, left_s / (rounds + 1))


def sums_pause_s(pace: SumsPace, round_s: float) -> float:
    """How long to wait after a round that took ``round_s``: links are not busy with copies all the time."""
    return max(round_s, pace.every_s - round_s)


def checkpoint_every_s(size_bytes: float, stall_s: float, *, on_device: bool, losses_per_hour: float) -> float:
    """Seconds between memory checkpoints: they cost a hundredth of the time, or less than what losses undo.

    Args:
        size_bytes: of the largest stage's state.
        stall_s: for which training stops while it is copied aside.
        on_device: processors, which send it and keep it, do not train.
        losses_per_hour: that were seen; 0: none.
    """
    cost_s = CHECKPOINT_S + stall_s + (0.0 if on_device else PROCESSOR_S_PER_BYTE * size_bytes)
    pays_s = young_s(cost_s, 3600 / losses_per_hour) if losses_per_hour else inf
    return min(cost_s / CHECKPOINT_SHARE, pays_s)


def checkpoint_pause_s(part_s: float, share_s: float) -> float:
    """How long to pause after a part of one that took ``part_s``, if ``share_s`` are meant for each part."""
    return min(LONGEST_PAUSE_S, max(pause_s(part_s), share_s - part_s))


class CopyPace:
    """Which steps a copy is made of: each one, as long as copies get ready in time."""

    def __init__(self) -> None:
        self.late = 0
        """copies in a row that took too long, or were not complete when the step ended"""
        self._skips = 0

    def begins(self) -> bool:
        """Whether to make a copy of this step's state."""
        if self._skips:
            self._skips -= 1
            return False
        return True

    def ended(self, copy_s: float | None, step_s: float) -> bool:
        """Note how long a copy and the step around it took (None: it is not complete); True: say that it takes long."""
        if copy_s is not None and copy_s <= max(SHORT_S, LONGEST * step_s):
            self.late = 0
            return False
        self.late += 1
        if self.late < _TOO_LATE:
            return False
        self._skips = min(_MOST_SKIPPED, 2 ** (self.late - _TOO_LATE + 1))
        return self.late == _TOO_LATE
