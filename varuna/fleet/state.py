"""What the manager knows of a run: frozen values that ``machine.advance`` replaces.

The life of a generation, as phases::

    Idle ──assign──> Running ──loss, suspicion, regroup──> Stopping ──verdict──> Idle
                        └──────everybody left──────> Finishing ──> Ended <── failure, from anywhere
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from varuna.core.messages import Beat, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.story import GenerationRecord

Planner = Callable[[JobFacts, int, int | None], Plan]
"""Plan for a number of workers and, if it is not None, this micro-batch; may raise ``NoPlanError``."""


class Checkpoint(NamedTuple):
    """A committed checkpoint: its folder, the steps that it contains, and the m that it was written with."""

    folder: str
    step: int
    micro_batch: int


@dataclass(frozen=True)
class Advice:
    """Answers that the state machine asks for while it decides."""

    plan: Planner
    checkpoint: Callable[[JobFacts], Checkpoint | None]
    """The newest committed checkpoint; may raise ``CheckpointError``."""
    store: Callable[[], tuple[str, int]]
    """Host and port of the store where process groups meet."""


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """How many workers, and how patient the manager is with them."""

    workers: int
    replace: bool = True
    """Whether a lost worker is replaced."""
    lease_s: float = 6.0
    """A worker that is silent for longer is frozen."""
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
    hold_timeout_s: float = 120.0
    """From Hold (or Apply) until a worker that has not answered is killed."""
    start_timeout_s: float = 300.0
    """From a worker's start to its Hello; also how long a run waits for workers that it cannot do without."""
    exit_grace_s: float = 1.0
    """Between the end of a connection and the end of its process."""
    leave_timeout_s: float = 30.0
    """From rank 0's exit to the end of all others, once the steps are done."""
    max_start_failures: int = 5
    """Replacements that may die in a row without a step in between."""


class Standing(Enum):
    """Where a worker is in its life; lost workers are forgotten."""

    STARTING = "starting"
    JOINED = "joined"
    LEFT = "left"
    DISMISSED = "dismissed"


@dataclass(frozen=True, slots=True)
class Holding:
    """State of a worker that stands still; ``next_step`` is None without state."""

    next_step: int | None = None
    sections: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended by itself."""

    code: int
    stderr_tail: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process, from its start until it is lost or gone."""

    name: str
    spawned_s: float
    replacement: bool
    standing: Standing = Standing.STARTING
    pid: int | None = None
    joined_s: float = 0.0
    seen_s: float = 0.0
    holding: Holding | None = None
    """None while the worker runs a generation, or is about to answer."""
    beat: Beat | None = None
    disconnected_s: float | None = None
    exit: Exit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """No generation; what every joined worker holds is known."""

    since_s: float
    in_flight: int = 0
    """Steps that were begun and lost when the last generation ended: 0 or 1."""
    rejected: tuple[str, ...] = ()
    """Workers for which there is no plan."""
    complaint: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A worker says that a link broke."""

    at_s: float
    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A generation forms or trains."""

    suspicion: Suspicion | None = None
    newcomers: tuple[str, ...] = ()
    """Set once rank 0 is asked for a regroup: those who gave the reason."""
    considered: frozenset[str] = frozenset()
    """Newcomers that are not worth a morph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """A generation is over; its members answer what they hold."""

    planned: bool
    deadline_s: float
    hold_at_s: float | None = None
    """When to say Hold to those that should stop by themselves; None once it was said."""
    applying: frozenset[str] = frozenset()
    """Laggards that were told the verdict and have not answered."""
    committed: bool = False
    """The verdict was COMMIT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing:
    """All steps are done; the scripts run to their ends."""

    deadline_s: float | None = None
    """Set once rank 0's process is gone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing matters any more."""

    exit_code: int
    text: str


Phase = Idle | Running | Stopping | Finishing | Ended


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Everything that decisions depend on, besides the event and the time."""

    config: FleetConfig
    phase: Phase
    ticked_s: float
    wanted: int
    """Workers that should exist."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    spawned: int = 0
    """Processes started so far."""
    spawning: int = 0
    """Processes asked for and not yet reported."""
    respawn_at_s: float = 0.0
    start_failures: int = 0
    job: JobFacts | None = None
    version: str = ""
    micro_batch: int | None = None
    """m of the run, once chosen."""
    history: tuple[GenerationRecord, ...] = ()
    departed: frozenset[str] = frozenset()
    """Workers that said Leaving."""
    causes: tuple[str, ...] = ()
    """Why the newest generation ended."""
    broke_s: float = 0.0
    """When the generation before the newest broke."""
    recorded_step: int = -1
    lineage: int = 0
    """Oldest generation whose votes count: a rollback abandons what came before."""
    votes: Mapping[int, Vote] = field(default_factory=dict)
    """By step: the newest recorded one, and those that are not recorded yet."""

    @staticmethod
    def empty(config: FleetConfig, now_s: float) -> "Fleet":
        """Before any worker exists."""
        return Fleet(config=config, phase=Idle(since_s=now_s), ticked_s=now_s, wanted=config.workers)

    @property
    def record(self) -> GenerationRecord:
        """The newest generation; there must be one."""
        return self.history[-1]

    @property
    def generation(self) -> int:
        """Number of the newest generation; -1 before the first."""
        return len(self.history) - 1

    @property
    def formed(self) -> bool:
        """Whether the newest generation recorded a step."""
        return self.record.recovery_seconds is not None

    @property
    def members(self) -> tuple[str, ...]:
        """Workers of the newest generation, lost ones included."""
        return self.record.members if self.history else ()

    @property
    def joined(self) -> tuple[str, ...]:
        """Workers that can be given a part, in the order in which they were spawned."""
        return tuple(name for name, worker in self.workers.items() if worker.standing is Standing.JOINED)

    @property
    def live_members(self) -> tuple[str, ...]:
        """Members of the newest generation that can still answer, by rank."""
        return tuple(name for name in self.members if self.is_joined(name))

    @property
    def is_leaving(self) -> bool:
        """Whether a rank of the newest generation reached the end of its loop."""
        return bool(self.history) and not self.departed.isdisjoint(self.record.grid)

    @property
    def missing(self) -> int:
        """Workers that should exist and do not."""
        return max(0, self.wanted - len(self.workers) - self.spawning)

    @property
    def more_to_come(self) -> bool:
        """Whether a worker is starting or will be."""
        starting = any(worker.standing is Standing.STARTING for worker in self.workers.values())
        return starting or self.spawning > 0 or self.missing > 0

    def is_joined(self, name: str) -> bool:
        """Whether ``name`` is alive and takes directives."""
        return name in self.workers and self.workers[name].standing is Standing.JOINED

    def rank_of(self, name: str) -> int | None:
        """Rank in the newest generation."""
        return self.members.index(name) if name in self.members else None
