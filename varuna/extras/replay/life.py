"""State of a replay's workers, and of the generation that they are in."""

from dataclasses import dataclass, field

from varuna.core.messages import Assignment, Beat, HeldCheckpoint, WorkerPhase
from varuna.core.sums import HeldSums
from varuna.fleet.state.config import FleetConfig


def patient(workers: int) -> FleetConfig:
    """Return a manager's settings for a recording, which alone says who goes."""
    forever_s = float("inf")
    return FleetConfig(
        workers=workers, lease_s=forever_s, wait_s=forever_s, start_timeout_s=forever_s, max_start_failures=10**9
    )


def beat_of(assignment: Assignment, *, whole: bool) -> Beat:
    """Return the beat of a rank in a generation's first step; ``whole``: all optimizer state is where it is wanted."""
    generation, step = assignment.generation, assignment.next_step
    return Beat(generation=generation, step=step, activity="", phase=WorkerPhase.STEPS, whole=whole)


@dataclass(slots=True)
class SimulatedWorker:
    """A simulated worker, with what it holds."""

    name: str
    alive: bool = True
    warm: bool = False
    next_step: int | None = None
    sections: frozenset[int] = frozenset()
    assignment: Assignment | None = None
    sums: HeldSums | None = None
    """Of the newest step that was broken off."""
    copied: frozenset[int] = frozenset()
    """Sections of another worker, whose state it had a copy of then."""
    kept: frozenset[int] = frozenset()
    """Sections that it had before its generation: until the first update, others may still need their state."""
    checkpoints: tuple[HeldCheckpoint, ...] = ()
    """In its memory."""


@dataclass(slots=True)
class Life:
    """The newest generation, as its ranks see it."""

    generation: int = -1
    waiting: set[str] = field(default_factory=set)
    over: bool = False
    regroup: bool = False
    save: bool = False
    formed: bool = False
    step: int = -1
    began_s: float | None = None
    """Time at which its step began; None between steps."""
    held_s: float | None = None
    """Time at which its ranks heard that it is over."""
    gone_s: dict[str, float] = field(default_factory=dict)
    kept_s: float = float("inf")
    """Seconds until keepers have the state that its step began with, since then; infinite: they do not get it."""
    whole: bool = False
    """No optimizer state is on its way any more."""
