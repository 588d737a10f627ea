"""Settings of a run's management: bounds, and what a morph must gain."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The number of workers, and the manager's patience with them."""

    workers: int
    replace: bool = True
    """Whether a lost worker is replaced."""
    elastic: bool = False
    """Workers come by themselves, from machines of their own: the run does not end while there are none, and the
    network may separate them from the manager."""
    lease_s: float = 6.0
    """A worker that is silent for longer, while its machine is heard, is frozen."""
    suspect_lease_s: float = 1.5
    """The same while somebody reports a broken link."""
    suspect_grace_s: float = 1.0
    """Time to find out who died before a generation ends on evidence alone."""
    gather_s: float = 60.0
    """From the first Hello until the first generation starts without the rest."""
    join_grace_s: float = 1.0
    """Workers that join within this time are taken in together."""
    min_gain: float = 0.01
    """Share of the step time that a newcomer must save to be worth a morph."""
    min_measured_gain: float = 0.10
    """The same for another plan of the same workers, since predictions are not better than some percent."""
    hold_timeout_s: float = 120.0
    """From Hold (or Apply) until a worker that has not answered is killed."""
    start_timeout_s: float = 300.0
    """From a worker's start to its Hello."""
    wait_s: float = 300.0
    """Seconds that a run waits for workers that it cannot do without."""
    return_s: float = 300.0
    """Seconds, at most, that the run waits for state out of sight before it falls back to a checkpoint."""
    futile_s: float = 60.0
    """Seconds for which generations may break before their first step, though nobody dies, until the run ends."""
    form_timeout_s: float = 300.0
    """From an assignment until newcomers that have not copied their state are dropped."""
    slow_ratio: float | None = None
    """A worker that computes this many times longer than its peers is left out; None: none ever is."""
    probation_s: float = 300.0
    """For how long, the first time; twice as long each time after."""
    exit_grace_s: float = 1.0
    """Between the end of a connection and the end of its process."""
    leave_timeout_s: float = 30.0
    """From rank 0's exit to the end of all others, once the steps are done."""
    max_start_failures: int = 5
    """Replacements that may die in a row without a step in between."""
    store_patience_s: float = 5.0
    """A store that has not said for this long which checkpoint is its newest is reported."""
