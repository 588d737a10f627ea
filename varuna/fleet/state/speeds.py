"""Speeds of workers and links, as they were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna.fleet.state.stutter import Straggler
from varuna.fleet.state.worker import changed


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of workers and links."""

    slow: Mapping[str, Straggler] = field(default_factory=dict)
    """By worker."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """By worker: how often it was found slow."""
    compute_s: tuple[tuple[float, ...], ...] = ()
    """By stage, ascending: what its ranks told of their compute in this generation, as if all were equally fast."""
    expected_s: tuple[float, ...] | None = None
    """By slot of the plan that runs: calibrated compute seconds per micro-batch; None if nothing was measured."""
    link_bytes_per_s: float | None = None
    """Of a link between two workers, as measured; None if nothing was."""

    def of_next_generation(self) -> "Speeds":
        """These, before anything was measured of another generation."""
        return changed(self, compute_s=(), expected_s=None)

    def of_next_training(self) -> "Speeds":
        """These, before anything was measured of another job."""
        return Speeds(slow=self.slow, strikes=self.strikes)
