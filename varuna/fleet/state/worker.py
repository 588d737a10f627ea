"""One worker, and one machine, as the manager sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from varuna.core.devices import DeviceFacts
from varuna.core.messages import Beat, HeldCheckpoint
from varuna.core.sums import HeldSums
from varuna.fleet.state.stutter import NO_EVIDENCE, StutterEvidence

T = TypeVar("T")


def changed(value: T, **changes: Any) -> T:
    """Like ``dataclasses.replace``, for a frozen dataclass without slots; quick, as each heartbeat changes a few."""
    fields = value.__dict__ | changes
    if len(fields) > len(value.__dict__):
        raise TypeError(f"{type(value).__name__} has none of the fields {sorted(changes)}")
    made = object.__new__(type(value))
    object.__setattr__(made, "__dict__", fields)
    return made


class WorkerStatus(Enum):
    """A state in a worker's life; lost workers are forgotten."""

    STARTING = "starting"
    JOINED = "joined"
    UNREACHABLE = "put aside"
    """Out of sight while the step stands still: lost once the next generation is written down without it."""
    LEFT = "left"
    DISMISSED = "dismissed"


@dataclass(frozen=True, slots=True)
class WorkerInventory:
    """State of a worker that stands still; ``next_step`` is None without state."""

    next_step: int | None = None
    sections: frozenset[int] = frozenset()
    """Whole: its own, and copies of another rank's."""
    lent: frozenset[int] = frozenset()
    """Without optimizer state, which other replicas hold."""
    sums: HeldSums | None = None
    """Of a step that was broken off."""
    wrong_sums: bool = False
    """A vote has shown that those of all ranks, and copies of them, are not what they should be."""
    checkpoints: tuple[HeldCheckpoint, ...] = ()
    """In its memory, of steps of before as well."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended by itself."""

    code: int
    stderr_tail: str
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process, from its start until it is lost or gone."""

    name: str
    replacement: bool
    device: DeviceFacts | None = None
    """That it computes on, if it has memory of its own."""
    device_class: str = ""
    """Of that, as the worker tells it; empty: unknown."""
    node: str = "local"
    """The VM: what it takes away with it when it goes."""
    standing: WorkerStatus = WorkerStatus.STARTING
    pid: int | None = None
    joined_s: float = 0.0
    seen_s: float = 0.0
    """Time at which it was last heard, on the clock of ``Fleet.listened_s``; see ``Fleet.seen_s``."""
    seated: bool = False
    """In the grid of the newest generation."""
    trained: bool = False
    """It had a seat in an earlier training of the script."""
    holding: WorkerInventory | None = None
    """None while the worker runs a generation, or is about to answer."""
    beat: Beat | None = None
    """The newest."""
    ran: int | None = None
    """The newest generation of which it said that it runs steps; when a link breaks, it says something else."""
    settled: int | None = None
    """Likewise, with all of its state."""
    compute_s: float | None = None
    """In this generation: the newest seconds of compute per micro-batch, forward and backward."""
    speed_adjusted_s: float | None = None
    """Likewise: what of that is in ``Fleet.compute_s``, by the speed that was known of it then."""
    evidence: StutterEvidence = NO_EVIDENCE
    """In this generation: whether it is slower than its peers."""
    lead: StutterEvidence = NO_EVIDENCE
    """Likewise: whether it is faster."""
    recent_s: tuple[float, ...] = ()
    """Likewise: its compute by the newest beats."""
    disconnected_s: float | None = None
    exit: Exit | None = None

    @property
    def is_joined(self) -> bool:
        """Whether it takes directives."""
        return self.standing is WorkerStatus.JOINED

    def hearing(self, beat: Beat) -> Mapping[str, Any]:
        """Fields that a heartbeat changes: what a worker has done in a generation stays done, whatever it does next."""
        running = beat.phase.is_running
        return {
            "beat": beat,
            "ran": beat.generation if running else self.ran,
            "settled": beat.generation if running and beat.whole else self.settled,
        }
