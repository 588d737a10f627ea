"""What the manager knows of a run: frozen values that ``machine.advance`` replaces.

The life of a generation, as phases::

    Idle ──assign──> Running ──loss, suspicion, regroup──> Stopping ──verdict──> Idle
                        └──────everybody left──────> Finishing ──> Ended <── failure, from anywhere
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from varuna.core.devices import worker_bytes
from varuna.core.messages import Flag, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.story import GenerationRecord
from varuna.fleet.stutter import Evidence
from varuna.fleet.weighing import Experience
from varuna.fleet.worker import Sight, Standing, Worker

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
    secret: Callable[[], str] = lambda: secrets.token_hex(32)
    """A new one for a generation, by which its members recognise each other."""
    predicted_s: Callable[[Plan], float] = lambda plan: plan.step_s
    """Seconds of a step of a plan, by what is known now and not when it was made."""
    expected_s: Callable[[JobFacts, Plan], Sequence[float] | None] = lambda job, plan: None
    """By stage: calibrated compute seconds per micro-batch; None if nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """How many workers, and how patient the manager is with them."""

    workers: int
    replace: bool = True
    """Whether a lost worker is replaced."""
    elastic: bool = False
    """Workers come by themselves, from machines of their own: the run never ends for want of them, and a cable can
    come between them and the manager."""
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
    hold_timeout_s: float = 120.0
    """From Hold (or Apply) until a worker that has not answered is killed."""
    start_timeout_s: float = 300.0
    """From a worker's start to its Hello."""
    wait_s: float = 300.0
    """How long a run waits for workers that it cannot do without."""
    return_s: float = 300.0
    """How long state that is out of sight is waited for, at most, before the run falls back to a checkpoint."""
    futile_s: float = 60.0
    """How long generation after generation may break before its first step, though nobody dies, until the run ends."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A node is about to leave."""

    deadline_s: float
    """Infinite if there is no hurry."""
    reason: str
    released: bool = False
    """The run does not need it any more."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow worker, left out until ``until_s``."""

    ratio: float
    until_s: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} times the compute time of its peers"


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
    waits: bool = False
    """People know that state is out of sight and waited for."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A worker says that a link broke."""

    at_s: float
    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A generation forms or trains."""

    began_s: float = 0.0
    """On the clock for silence."""
    suspicion: Suspicion | None = None
    flags: frozenset[Flag] = frozenset()
    """What rank 0 was asked to raise in the next vote."""
    regroup: str = ""
    """Why, if that is a planned morph."""
    considered: frozenset[str] = frozenset()
    """Newcomers that are not worth a morph."""
    considered_s: float = 0.0
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    """By worker: whether it is slower than its peers."""
    longest_wait_s: float = 0.0
    """For which a rank waited for its peers, and then went on."""
    still_step: int = -1
    """Newest step when it was told that training stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """A generation is over; its members answer what they hold."""

    planned: bool
    deadline_s: float
    """On the clock for silence."""
    hold_at_s: float | None = None
    """When to say Hold to those that should stop by themselves; None once it was said."""
    applying: frozenset[str] = frozenset()
    """Laggards that were told the verdict and have not answered."""
    committed: bool = False
    """The verdict was COMMIT."""
    suspicion: Suspicion | None = None
    """What was reported before it was over."""
    waits: bool = False
    """People know that state is out of sight and waited for."""


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
    listened_s: float = 0.0
    """The clock for silence: it stands still while this manager could not have heard anybody."""
    is_alone: bool = False
    """Nobody at all is heard, of an elastic fleet."""
    told_alone: bool = False
    """People know that."""
    heard_s: float = 0.0
    """When anybody was heard last."""
    regained_s: float = float("-inf")
    """When that ended for the last time, on the clock for silence."""
    nodes: Mapping[str, Sight] = field(default_factory=dict)
    """By machine, of an elastic fleet."""
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
    planned: bool = False
    """Whether it was a planned morph that ended it."""
    planned_for: int = 0
    """Workers that the newest plan could have used."""
    futile: int = 0
    """Generations in a row that broke before a step without anybody's death."""
    futile_since_s: float | None = None
    """When the first of them did, those before newcomers were dropped included; on the clock for silence."""
    experience: Experience = field(default_factory=lambda: Experience(began_s=0.0))
    departing: Mapping[str, Departure] = field(default_factory=dict)
    """By node."""
    slow: Mapping[str, Straggler] = field(default_factory=dict)
    """By worker: who is left out of plans."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """By worker: how often it was found slow."""
    morph_asked: bool = False
    foreseen: Mapping[int, Plan | None] = field(default_factory=dict)
    """Plans by number of workers, as far as this generation asked for them."""
    replan: bool = False
    """The next generation asks the planner, whatever ran before."""
    finish_reason: str = ""
    """Why the run should end after the current step."""
    recorded_step: int = -1
    recorded_s: float = 0.0
    saved_step: int = 0
    """Steps in the newest checkpoint of which a shard is durable."""
    step_wall_s: float = 0.0
    """Seconds that the newest recorded step took."""
    step_every_s: float = 0.0
    """From one recorded step to the next, with what the script does in between."""
    lineage: int = 0
    """Oldest generation whose votes count: a rollback abandons what came before."""
    votes: Mapping[int, Vote] = field(default_factory=dict)
    """By step: the newest recorded one, and those that are not recorded yet."""

    @staticmethod
    def empty(config: FleetConfig, now_s: float) -> "Fleet":
        """Before any worker exists."""
        return Fleet(
            config=config,
            phase=Idle(since_s=now_s),
            ticked_s=now_s,
            listened_s=now_s,
            heard_s=now_s,
            wanted=0 if config.elastic else config.workers,
            experience=Experience(began_s=now_s),
        )

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
    def memory_bytes(self) -> int | None:
        """What every joined worker's device has for it; None if nobody has said."""
        return worker_bytes(self.workers[name].device for name in self.joined)

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
        staying = sum(worker.node not in self.departing for worker in self.workers.values())
        # A launcher may have nothing but a leaving node to start them on: twice as many at most.
        room = 2 * self.wanted - len(self.workers)
        return max(0, min(self.wanted - staying, room) - self.spawning)

    @property
    def is_starting(self) -> bool:
        """Whether a worker is warming up."""
        return any(worker.standing is Standing.STARTING for worker in self.workers.values())

    @property
    def more_to_come(self) -> bool:
        """Whether a worker is starting or will be."""
        return self.is_starting or self.spawning > 0 or self.missing > 0 or self.config.elastic

    @property
    def available(self) -> tuple[str, ...]:
        """Joined workers that new plans should use: neither about to leave, nor slow, nor out of sight."""
        return tuple(
            name
            for name in self.joined
            if not self.is_departing(name) and name not in self.slow and not self.is_hidden(self.workers[name].node)
        )

    def silence_s(self, worker: Worker) -> float:
        """For how long a worker has said nothing although it would have been heard."""
        heard_s = self.listened_s
        if self.config.elastic:
            heard_s = self.nodes[worker.node].heard_s if worker.node in self.nodes else worker.seen_s
        return heard_s - worker.seen_s

    def unheard_s(self, node: str) -> float:
        """For how long nothing has come from a machine, of the time in which the manager listened."""
        if not self.config.elastic or node not in self.nodes:
            return 0.0
        return self.listened_s - self.nodes[node].heard_s

    def is_hidden(self, node: str) -> bool:
        """Whether a machine is out of sight."""
        return self.unheard_s(node) > self.config.lease_s

    def is_departing(self, name: str) -> bool:
        """Whether a worker's node is about to leave."""
        return self.workers[name].node in self.departing

    def is_joined(self, name: str) -> bool:
        """Whether ``name`` is alive and takes directives."""
        return name in self.workers and self.workers[name].standing is Standing.JOINED

    def rank_of(self, name: str) -> int | None:
        """Rank in the newest generation."""
        return self.members.index(name) if name in self.members else None
