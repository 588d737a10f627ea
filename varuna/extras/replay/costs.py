"""Costs of changes: seconds that a replay adds to the planner's step times."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphCosts:
    """Costs of a morph inside living workers, without copies of state, which follow from bytes and the link.

    Generous next to what ``benchmarks/recovery.py`` shows for 4 CPU workers of one machine, where a whole morph takes a
    tenth of a second to a second: a cluster has more workers and a slower network.
    """

    lease_s: float = 6.0
    """Silence after which a worker counts as dead: a VM that vanishes closes no connection."""
    stop_s: float = 0.5
    """Time from Hold to the answer of the last survivor."""
    form_s: float = 2.0
    """Time to make the groups of a new generation, without copies of state."""
    warm_s: float = 30.0
    """Time from a VM's appearance to a worker that could run at once: 25 s for the VM's own start, which was not
    measured, and imports and the run's captured model, 5 s for 2.5 billion parameters (``benchmarks/newcomer.py``)."""
    keeps_sums: bool = True
    """Whether survivors continue from the sums of gradients that they have of a step that a loss breaks off."""
    copies: bool = True
    """Whether workers keep copies of each other's sums, and where D is 1 of their state, if the planner finds them
    worth it: in the memory of hosts, whose size is not known unless the calibration says it. What they cost was
    measured where processors train."""
    checkpoints: bool = True
    """Whether to save at Young's interval, from the losses so far and the run's own snapshot times."""
    snapshot_bytes_per_s: float = 5e9
    """Rate at which state is copied out at a step boundary, while training waits."""
    upload_bytes_per_s: float = 0.5e9
    """Rate at which it is then written in the background."""
    load_bytes_per_s: float = 0.5e9

    def saving_s(self, size_bytes: float) -> tuple[float, float]:
        """Return the seconds that training waits while state is copied out, and those until it is written."""
        return size_bytes / self.snapshot_bytes_per_s, size_bytes / self.upload_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCosts:
    """Costs of a change for jobs that restart: kill all, start all, read the last checkpoint.

    110 s are a regroup of torchrun with everything that a process does before its first step
    (reference: elastic launchers, secondary source); the original Varuna sleeps 120 s.
    """

    restart_s: float = 110.0
    snapshot_bytes_per_s: float = 5e9
