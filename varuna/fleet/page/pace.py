"""The time that a run will take, at the pace of its newest steps. Pure."""

from collections import deque

_RECENT_STEPS = 32
_ENDLESS_S = 30 * 86400.0
"""A loop that is longer is meant to end by itself."""


class StepPace:
    """Moments of the newest steps of a generation, by any clock."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)

    def begin_generation(self) -> None:
        """Begin a generation: its steps take their own time."""
        self._steps.clear()

    def add_step(self, step: int, time_s: float) -> None:
        """Note a committed step."""
        self._steps.append((step, time_s))

    def left_s(self, total: int) -> float | None:
        """Seconds from the newest step to the end of the run; None as long as there is no pace, or no end in sight."""
        if not self._steps:
            return None
        (first, first_s), (last, last_s) = self._steps[0], self._steps[-1]
        if last <= first or total <= last + 1:
            return None
        left_s = (last_s - first_s) / (last - first) * (total - 1 - last)
        return left_s if left_s <= _ENDLESS_S else None
