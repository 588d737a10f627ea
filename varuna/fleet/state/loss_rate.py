"""The rate at which a run loses workers: an estimate that forgets, and the rate to plan for, without wobbles. Pure."""

from dataclasses import dataclass, replace
from math import exp

_PRIOR_S = 1800.0
"""A run begins as if it had watched so long, and seen no more losses than it was told of."""
_FORGETS_S = 6 * 3600.0
"""Age in seconds from which a loss counts for little."""
NOTICED = 0.1
"""Of a loss, that one with a notice counts for: there is a morph, but nothing runs again."""
_WOBBLE = 2.0
"""So many times more or less losses are no reason to plan for another rate."""
_LEAST_PER_HOUR = 0.01
SPOT_PER_HOUR = 2.4
"""Of machines that may be taken away at any time, until a run has seen for itself. Two recorded clusters, of 13 and 57
machines on average, lost some 4.5 and 1.3 times an hour: this is their geometric mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRate:
    """Losses of a run so far; those within one morph count as one."""

    began_s: float
    prior_per_hour: float = 0.0
    """Of the manager before this one."""
    seen: float = 0.0
    """Losses, less what was forgotten by ``seen_s``."""
    seen_s: float = float("-inf")
    planned_per_hour: float = 0.0
    """That plans are made for; settled when a generation ends."""

    def lost(self, now_s: float, *, burst_s: float, noticed: bool) -> "LossRate":
        """Count the loss of a worker; those within ``burst_s`` are one loss.

        Args:
            now_s: the time.
            burst_s: within which workers go together, as with a machine.
            noticed: there was a notice.
        """
        if now_s <= self.seen_s + burst_s:
            return self
        return replace(self, seen=self._seen(now_s) + (NOTICED if noticed else 1.0), seen_s=now_s)

    def on_spot_machines(self, now_s: float) -> "LossRate":
        """Some machines may be taken away at any time; no news to a run that has seen losses."""
        if self.seen or self.prior_per_hour:
            return self
        expected = replace(self, prior_per_hour=SPOT_PER_HOUR)
        return replace(expected, planned_per_hour=expected.to_plan_for(now_s))

    def per_hour(self, now_s: float) -> float:
        """The estimate."""
        kept = exp(-max(0.0, now_s - self.began_s) / _FORGETS_S)
        watched_s = _FORGETS_S * (1 - kept)
        prior = self.prior_per_hour * kept * _PRIOR_S / 3600
        return 3600 * (self._seen(now_s) + prior) / (watched_s + _PRIOR_S * kept)

    def to_plan_for(self, now_s: float) -> float:
        """The rate to plan for: the one that was planned for, unless the estimate has left it by far."""
        planned_per_hour = self.planned_per_hour
        estimate = self.per_hour(now_s)
        if estimate < _LEAST_PER_HOUR:
            return 0.0
        if planned_per_hour / _WOBBLE <= estimate <= planned_per_hour * _WOBBLE:
            return planned_per_hour
        return float(f"{estimate:.2g}")

    def _seen(self, now_s: float) -> float:
        return self.seen * exp(-max(0.0, now_s - self.seen_s) / _FORGETS_S) if self.seen else 0.0
