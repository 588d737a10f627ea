"""Starts of workers: how many there should be, and how many were asked for."""

from dataclasses import dataclass

from varuna.fleet.state.worker import changed

_MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Workers that should exist, and processes that were asked for."""

    wanted: int
    """Workers that should exist."""
    spawned: int = 0
    """Processes started so far."""
    spawning: int = 0
    """Processes asked for and not yet reported."""
    failures: int = 0
    """Replacements that died in a row without a step in between."""
    again_s: float = 0.0
    """Time from which others may be asked for."""

    def with_more(self, workers: int) -> "Starts":
        """These, with so many more workers wanted; with a negative number, fewer."""
        return changed(self, wanted=max(0, self.wanted + workers))

    def failed(self, now_s: float, *, before_joining: bool) -> "Starts":
        """These, after one more replacement has died: the next one is asked for later each time."""
        backoff_s = min(2.0**self.failures, _MAX_BACKOFF_S) if before_joining else 0.0
        return changed(self, failures=self.failures + 1, again_s=now_s + backoff_s)

    def succeeded(self) -> "Starts":
        """These, after a step."""
        return changed(self, failures=0)
