"""The manager's knowledge of a run: frozen values that ``machine.advance`` replaces."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from varuna.core.devices import WorkerGroup, WorkerGroups, class_in, device_of, region_of_zone, worker_bytes
from varuna.core.messages import Hello
from varuna.core.model import JobFacts
from varuna.fleet.state.causes import EndCause, FinishWish
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.contacts import Contacts
from varuna.fleet.state.device_faults import BrokenDevice, ShortMemory
from varuna.fleet.state.loss_rate import LossRate
from varuna.fleet.state.morph_gain import FirstStep, MorphHistory
from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.phases import Finishing, Idle, Phase
from varuna.fleet.state.questions import Questions
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.run_events import GenerationRecord, TrainingEnded
from varuna.fleet.state.silence import Silence
from varuna.fleet.state.stutter import NO_EVIDENCE, Straggler
from varuna.fleet.state.worker import Worker, WorkerStatus, changed
from varuna.fleet.state.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A node is about to leave."""

    deadline_s: float
    """Infinite if there is no hurry."""
    reason: str
    released: bool = False
    """The run does not need it any more."""

    @property
    def is_drain(self) -> bool:
        """Whether somebody wants the node back, and nobody takes it away."""
        return self.deadline_s == float("inf")


@dataclass(frozen=True, slots=True)
class Risk:
    """A node may be taken away soon; spares on other nodes are better."""

    reason: str
    replaced: bool = False
    """A morph to spares was asked for; another would not go better."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Everything that decisions depend on, besides the event and the time."""

    config: FleetConfig
    phase: Phase
    ticked_s: float
    wanted: int
    """Workers that should exist."""
    contacts: Contacts
    workers: Workers = field(default_factory=Workers)
    expiring_s: float = float("-inf")
    """Until then no worker's time is up, but for those of ``watched``."""
    watched: frozenset[str] = frozenset()
    """Workers that ended, or lost their connection, or were silent while their machine was heard."""
    compute_s: tuple[tuple[float, ...], ...] = ()
    """By stage, ascending: what its ranks told of their compute in this generation, as if all were equally fast."""
    spawned: int = 0
    """Processes started so far."""
    spawning: int = 0
    """Processes asked for and not yet reported."""
    respawn_at_s: float = 0.0
    start_failures: int = 0
    trainings: tuple[TrainingEnded, ...] = ()
    """Of the script, those that are over."""
    began: int = 0
    """The first generation of the present one."""
    ahead: Mapping[str, Hello] = field(default_factory=dict)
    """By worker: words of those that wait for the next training."""
    job: JobFacts | None = None
    version: str = ""
    micro_batch: int | None = None
    """m of the run, once chosen."""
    history: tuple[GenerationRecord, ...] = ()
    """Generations of the present training."""
    departed: frozenset[str] = frozenset()
    """Workers that said Leaving."""
    left_step: int = 0
    """Steps of the training, by those who have left it."""
    main_ended: bool = False
    """Rank 0's script came to its end."""
    script_ended: bool = False
    """Some worker's did."""
    causes: tuple[EndCause, ...] = ()
    """The reasons why the newest generation ended."""
    broke_s: float = 0.0
    """Time at which the generation before the newest broke."""
    planned: bool = False
    """Whether it was a planned morph that ended it."""
    first_step: FirstStep | None = None
    """After such a morph, until the next step says how long one takes."""
    planned_for: Mapping[str, int] = field(default_factory=dict)
    """Workers that the newest plan could have used, by class of device."""
    futile: int = 0
    """Generations in a row that broke before a step without anybody's death."""
    futile_since_s: float | None = None
    """Time at which the first of them did, those before newcomers were dropped included; on the clock for silence."""
    experience: MorphHistory = field(default_factory=lambda: MorphHistory(began_s=0.0))
    loss_rate: LossRate = field(default_factory=lambda: LossRate(began_s=0.0))
    departing: Mapping[str, Departure] = field(default_factory=dict)
    """By node."""
    zones: PersistentMap[str] = field(default_factory=PersistentMap)
    """By node, where that is known: its region, a slash and its zone, or one name for both."""
    at_risk: Mapping[str, Risk] = field(default_factory=dict)
    """By node: those that a cloud advises to replace."""
    slow: Mapping[str, Straggler] = field(default_factory=dict)
    """By worker: those that are left out of plans, or get fewer micro-batches."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """By worker: how often it was found slow."""
    broken: Mapping[str, BrokenDevice] = field(default_factory=dict)
    """By name of a device: those that failed."""
    silences: Mapping[tuple[str, str], Silence] = field(default_factory=dict)
    """By machine that says so, and machine that it cannot reach."""
    short: Mapping[str, ShortMemory] = field(default_factory=dict)
    """By class of device: those whose workers ran out of memory."""
    morph_asked: bool = False
    morph_reason: str = "a morph was requested"
    """The reason why it was asked for."""
    save_asked: bool = False
    """Somebody wants a checkpoint now, and rank 0 has not been told."""
    questions: Questions = field(default_factory=Questions)
    expected_s: tuple[float, ...] | None = None
    """By slot of the plan that runs: calibrated compute seconds per micro-batch; None if nothing was measured."""
    link_bytes_per_s: float | None = None
    """Of a link between two workers, as measured; None if nothing was."""
    replan: bool = False
    """The next generation asks the planner, whatever ran before."""
    finish: FinishWish | None = None
    recorded: RecordedSteps = field(default_factory=RecordedSteps)

    @staticmethod
    def empty(config: FleetConfig, now_s: float) -> "Fleet":
        """Before any worker exists."""
        return Fleet(
            config=config,
            phase=Idle(since_s=now_s),
            ticked_s=now_s,
            contacts=Contacts(heard_s=now_s, listened_s=now_s),
            wanted=0 if config.elastic else config.workers,
            experience=MorphHistory(began_s=now_s),
            loss_rate=LossRate(began_s=now_s),
        )

    def begin_training(self, ended: TrainingEnded, now_s: float) -> "Fleet":
        """The next training of the script begins: of the one before only workers and machines are left.

        Whoever has left it, or was dismissed from its end, will say Hello once more.
        """
        workers = [
            changed(
                worker,
                standing=WorkerStatus.DISMISSED if self.is_departing(worker.name) else WorkerStatus.STARTING,
                seated=False,
                trained=worker.trained or any(worker.name in record.ranks for record in self.history),
                holding=None,
                ran=None,
                settled=None,
                compute_s=None,
                fair_s=None,
                evidence=NO_EVIDENCE,
                lead=NO_EVIDENCE,
                recent_s=(),
            )
            for worker in self.workers.values()
        ]
        fresh = Fleet.empty(self.config, now_s)
        kept = {name: getattr(fresh, name) for name in _OF_TRAINING}
        return replace(
            self,
            **kept,
            phase=Idle(since_s=now_s),
            contacts=self.contacts.unproved(),
            workers=Workers(workers),
            trainings=(*self.trainings, ended),
            began=self.generation + 1,
            questions=self.questions.anew(),
            recorded=RecordedSteps(lineage=self.generation + 1),
        )

    @property
    def listened_s(self) -> float:
        """The time on the clock for silence."""
        return self.contacts.listened_s

    @property
    def training(self) -> int:
        """Number of the script's training that runs, from 0."""
        return len(self.trainings)

    @property
    def record(self) -> GenerationRecord:
        """The newest generation; there must be one."""
        return self.history[-1]

    def record_of(self, generation: int) -> GenerationRecord | None:
        """A generation of the present training; None if it is none."""
        index = generation - self.began
        return self.history[index] if 0 <= index < len(self.history) else None

    @property
    def generation(self) -> int:
        """Number of the newest generation; -1 before the first. Numbers go on from one training to the next."""
        return self.began + len(self.history) - 1

    @property
    def formed(self) -> bool:
        """Whether the newest generation recorded a step."""
        return self.record.recovery_seconds is not None

    @property
    def is_settled(self) -> bool:
        """Whether all ranks of the newest generation have their state, so that nobody else is needed as a source."""
        return self.formed or all(
            name in self.workers and self.workers[name].settled == self.generation for name in self.record.grid
        )

    @property
    def members(self) -> tuple[str, ...]:
        """Workers of the newest generation, lost ones included."""
        return self.record.members if self.history else ()

    @property
    def joined(self) -> tuple[str, ...]:
        """Workers that can be given a part, in the order in which they were spawned."""
        return tuple(name for name, worker in self.workers.items() if worker.is_joined)

    def groups_of(self, names: Iterable[str], *, by_speed: bool = False) -> WorkerGroups:
        """Describe these workers to the planner: by class, in the order of their names, the fastest first.

        Args:
            names: of workers.
            by_speed: how fast each is counts; else all are as fast.
        """
        members: dict[str, list[str]] = {}
        for name, device_class in self.device_classes(names).items():
            members.setdefault(device_class, []).append(name)
        found: list[WorkerGroup] = []
        for device_class, each in sorted(members.items()):
            memory_bytes = worker_bytes(self.workers[name].device for name in each)
            short = self.short.get(device_of(device_class), ShortMemory(times=0, generation=0))
            speeds = Counter(self.speed_of(name) if by_speed else 1.0 for name in each)
            for speed, count in sorted(speeds.items(), reverse=True):
                group = WorkerGroup.of_class(
                    device_class, count, speed=speed, memory_bytes=memory_bytes, memory_part=short.part
                )
                found.append(group)
        return tuple(found)

    def counted(self, names: Iterable[str]) -> dict[str, int]:
        """The number of these workers by class of device."""
        return dict(Counter(self.device_classes(names).values()))

    def device_classes(self, names: Iterable[str]) -> dict[str, str]:
        """By worker, the class of its device: in its region, if workers that have joined are in several."""
        regions = self._regions
        workers = map(self.workers.__getitem__, names)
        if len(set(regions.values())) < 2:
            return {worker.name: worker.device_class for worker in workers}
        return {worker.name: class_in(worker.device_class, regions.get(worker.node, "")) for worker in workers}

    @property
    def _regions(self) -> dict[str, str]:
        """By node that has a worker which has joined: its region, where that is known."""
        return {
            node: region_of_zone(zone)
            for node, zone in self.zones.items()
            if any(self.workers[name].is_joined for name in self.workers.on(node))
        }

    @property
    def live_members(self) -> tuple[str, ...]:
        """Members of the newest generation that can still answer, by rank."""
        return tuple(name for name in self.members if self.is_joined(name))

    @property
    def is_leaving(self) -> bool:
        """Whether a rank of the newest generation reached the end of its loop."""
        return any(self.record.has_seat(name) for name in self.departed)

    @property
    def is_orphaned(self) -> bool:
        """Whether a training is over, and all who have ended it are gone before their scripts came to an end."""
        return isinstance(self.phase, Finishing) and not (self.workers.unfinished or self.script_ended)

    @property
    def missing(self) -> int:
        """Workers that should exist and do not: once a rank is through, nobody else is needed to end the script."""
        if self.is_leaving and not self.is_orphaned:
            return 0
        leaving = sum(len(self.workers.on(node)) for node in self.departing) if self.config.replace else 0
        # A launcher may have nothing but a leaving node to start them on: twice as many at most.
        room = 2 * self.wanted - len(self.workers)
        resting = len(self.resting) if self.config.replace else 0
        return max(0, min(self.wanted + leaving - len(self.workers), room) - resting - self.spawning)

    @property
    def resting(self) -> tuple[str, ...]:
        """Lost workers whose GPUs have failed, and get no other worker yet."""
        return tuple(name for each in self.broken.values() if self.ticked_s < each.until_s for name in each.workers)

    @property
    def is_starting(self) -> bool:
        """Whether a worker is warming up."""
        return self.workers.count(WorkerStatus.STARTING) > 0

    @property
    def more_to_come(self) -> bool:
        """Whether a worker is starting or will be."""
        return self.is_starting or self.spawning > 0 or self.missing > 0 or self.config.elastic

    @property
    def available(self) -> tuple[str, ...]:
        """Joined workers that new plans should use: in touch, and neither about to leave nor slow."""
        return tuple(name for name in self.joined if self.is_available(name))

    def is_available(self, name: str) -> bool:
        """Whether new plans should use a worker that has joined."""
        return name not in self.slow and self._stays(name)

    @property
    def staying(self) -> tuple[str, ...]:
        """Joined workers that are in touch and do not leave, slow ones too."""
        return tuple(filter(self._stays, self.joined))

    @property
    def in_touch(self) -> tuple[str, ...]:
        """Joined workers that could be told of a part now, those about to leave too."""
        return tuple(filter(self.is_in_touch, self.joined))

    def is_in_touch(self, name: str) -> bool:
        """Whether a worker could be told of a part now: its connection and its machine's are open, and that is heard.

        Who is not may well live, but would keep a generation waiting that it is to be in.
        """
        worker = self.workers[name]
        sight = self.contacts.nodes.get(worker.node)
        is_open = worker.disconnected_s is None and (sight is None or sight.parted_after is None)
        return is_open and not self.is_hidden(worker.node)

    def _stays(self, name: str) -> bool:
        return not self.is_departing(name) and self.is_in_touch(name)

    def speed_of(self, name: str) -> float:
        """Return a worker's speed, the fastest one's being 1."""
        return self.slow[name].speed if name in self.slow else 1.0

    def seen_s(self, worker: Worker) -> float:
        """Return when a worker was last known to live: by its own word, or by a step that was committed."""
        return max(worker.seen_s, self.contacts.progressed_s) if worker.seated and worker.is_joined else worker.seen_s

    def is_parted(self, node: str) -> bool:
        """Whether the connection to a machine ended, and nothing has shown since that its workers live."""
        sight = self.contacts.nodes.get(node)
        if sight is None or sight.parted_after is None:
            return False
        shown = sight.parted_after < self.contacts.progresses
        there = map(self.workers.__getitem__, self.workers.on(node))
        return not (shown and any(worker.seated and worker.is_joined for worker in there))

    def silence_s(self, worker: Worker) -> float:
        """Seconds for which a worker has said nothing although it would have been heard."""
        contacts, seen_s = self.contacts, self.seen_s(worker)
        if not self.config.elastic:
            return contacts.listened_s - seen_s
        sight = contacts.nodes.get(worker.node)
        return 0.0 if sight is None else sight.heard_s - seen_s

    def unheard_s(self, node: str) -> float:
        """Seconds for which nothing has come from a machine, while the manager listened."""
        sight = self.contacts.nodes.get(node) if self.config.elastic else None
        return 0.0 if sight is None else self.contacts.listened_s - sight.heard_s

    def is_hidden(self, node: str) -> bool:
        """Whether a machine is out of sight."""
        return self.unheard_s(node) > self.config.lease_s

    def is_departing(self, name: str) -> bool:
        """Whether a worker's node is about to leave."""
        return self.workers[name].node in self.departing

    def without_risk(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these workers whose nodes no cloud advises to replace."""
        return tuple(name for name in names if self.workers[name].node not in self.at_risk)

    def is_joined(self, name: str) -> bool:
        """Whether ``name`` is alive and takes directives."""
        return name in self.workers and self.workers[name].standing is WorkerStatus.JOINED

    def rank_of(self, name: str) -> int | None:
        """Rank in the newest generation."""
        return self.record.ranks.get(name) if self.history else None

    def is_member(self, name: str) -> bool:
        """Whether a worker, lost or not, belongs to the newest generation."""
        return bool(self.history) and name in self.record.ranks


_OF_TRAINING = (
    *("compute_s", "expiring_s", "ahead", "job", "micro_batch", "history", "departed", "left_step", "main_ended"),
    *("script_ended", "causes", "broke_s", "planned", "first_step", "planned_for", "futile", "futile_since_s"),
    *("morph_asked", "morph_reason", "save_asked", "expected_s", "link_bytes_per_s", "replan"),
)
"""Fields of a fleet that begin anew with each training."""
