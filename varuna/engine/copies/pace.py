"""How fast copies are made, and when one is not worth trying. Pure.

Copies share links and processors with the training. So they pause after each part, and a worker whose copies do not get
ready in time makes them less often.
"""

LINK_SHARE = 0.5
"""Of a link's time, at most, goes to copies."""
LONGEST = 0.1
"""Of a step, that a copy may take: until it is complete, the loss of its owner is what it is without copies."""
_SUMS_EVERY_S, _SUMS_SHARE = 5.0, 0.02
"""Seconds between copies of a step's sums of gradients, and the share of time that making them may take."""
LONGEST_PAUSE_S = 1.0
SHORT_S = 0.25
"""A copy may take so long, however short a step is."""
_TOO_LATE, _MOST_SKIPPED = 3, 64


def pause_s(part_s: float) -> float:
    """How long to pause after a part that took ``part_s``, so that copies take their share of a link's time."""
    return min(LONGEST_PAUSE_S, part_s * (1 / LINK_SHARE - 1))


def sums_pause_s(round_s: float) -> float:
    """How long to wait after copies of all sums that took ``round_s``: the training thread makes a part of them."""
    return max(_SUMS_EVERY_S, round_s * (1 / _SUMS_SHARE - 1))


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
