"""The pace at which copies are made, and rules for when one is not worth trying. Pure.

Copies share links and processors with the training, so they pause after each part. The engine makes them by these
rules, the planner prices them, and a replay models them.
"""

from math import inf
from typing import NamedTuple

from varuna.core.saved import young_s

LINK_SHARE = 0.5
"""Of a link's time, at most, goes to copies."""
HURRY = 0.05
"""Share of the time between two copies of state in which one makes no pauses. Until it is complete, a loss sends the
run back to the one before."""
PROCESSOR_S_PER_BYTE = 1.9e-9
"""Of a worker that sends copies and keeps as many of another's (``benchmarks.copy_cost``, 24 November 2026). Where
processors do not train, as beside GPUs, it is more than a copy can cost."""
_SUMS_EVERY_S, _SUMS_SHARE = 5.0, 0.02
"""Seconds between copies of a step's sums of gradients, at least, and the share of time that making them may take."""
LONGEST_PAUSE_S = 1.0
CHECKPOINT_S, CHECKPOINT_SHARE = 2e-3, 0.01
"""Seconds that a memory checkpoint takes, however small the state is, and the share of time for making them."""


def pause_s(part_s: float) -> float:
    """Return the seconds to pause after a part that took ``part_s``, so that copies take their share of a link."""
    # Of a share s of the time, copying leaves (1 - s) / s of what a part took for the pause.
    return min(LONGEST_PAUSE_S, part_s * (1 / LINK_SHARE - 1))


def copying_s(size_bytes: float, link_bytes_per_s: float) -> float:
    """Return the seconds that copies of ``size_bytes`` are under way, with the pauses between their parts."""
    return size_bytes / (link_bytes_per_s * LINK_SHARE)


def state_pause_s(part_s: float, since_s: float, every_s: float) -> float:
    """Return ``pause_s`` after a part of a state's copy that began ``since_s`` ago; there is one ``every_s``."""
    return 0.0 if since_s < HURRY * every_s else pause_s(part_s)


def state_copying_s(size_bytes: float, link_bytes_per_s: float, every_s: float) -> float:
    """Return the seconds that the copy of a state is under way, where there is one ``every_s``."""
    hurried_bytes = min(size_bytes, link_bytes_per_s * HURRY * every_s)
    return hurried_bytes / link_bytes_per_s + copying_s(size_bytes - hurried_bytes, link_bytes_per_s)


class SumsPace(NamedTuple):
    """The rounds in which a step's sums are copied: all of them, one section after another, in each round."""

    rounds: int
    """none: the step is too short"""
    every_s: float
    """from the begin of one to that of the next, and before the first"""


def sums_pace(left_s: float, size_bytes: int, round_s: float) -> SumsPace:
    """Choose the pace for what is left of a step.

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
    # n rounds divide what is left into n + 1 intervals; at the end of the last the step ends, too.
    rounds = int(left_s / least_s) - 1
    if cost_s:
        rounds = min(rounds, int(left_s * _SUMS_SHARE / cost_s))
    if rounds < 1:
        return SumsPace(0, max(least_s, cost_s / _SUMS_SHARE))
    return SumsPace(rounds, left_s / (rounds + 1))


def sums_pause_s(pace: SumsPace, round_s: float) -> float:
    """Return the seconds to wait after a round that took ``round_s``: links are not always busy with copies."""
    return max(round_s, pace.every_s - round_s)


def checkpoint_every_s(size_bytes: float, stall_s: float, *, on_device: bool, losses_per_hour: float) -> float:
    """Return the seconds between memory checkpoints: they cost a hundredth of the time, or less than what losses undo.

    Args:
        size_bytes: of the largest stage's state.
        stall_s: for which training stops while it is copied aside.
        on_device: processors, which send it and keep it, do not train.
        losses_per_hour: that were seen; 0: none.
    """
    # On devices the host's processors are free for it: only the stall delays training.
    cost_s = CHECKPOINT_S + stall_s + (0.0 if on_device else PROCESSOR_S_PER_BYTE * size_bytes)
    pays_s = young_s(cost_s, 3600 / losses_per_hour) if losses_per_hour else inf
    return min(cost_s / CHECKPOINT_SHARE, pays_s)


def checkpoint_stall_s(aside_s: float, step_s: float, *, on_device: bool) -> float:
    """Return the seconds that training stops while state is copied aside; beside a device only an update waits."""
    return max(0.0, aside_s - step_s) if on_device else aside_s
