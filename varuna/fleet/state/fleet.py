"""The manager's knowledge of a run: frozen values that ``machine.advance`` replaces."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from varuna.core.devices import WorkerGroup, WorkerGroups, class_in, device_of, region_of_zone, worker_bytes
from varuna.core.model import JobFacts
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.contacts import Contacts
from varuna.fleet.state.generations import Generations
from varuna.fleet.state.loss_rate import LossRate
from varuna.fleet.state.machines import Machines, ShortMemory
from varuna.fleet.state.morph_gain import MorphHistory
from varuna.fleet.state.phases import Finishing, Idle, Phase
from varuna.fleet.state.questions import Questions
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.requests import Requests
from varuna.fleet.state.run_events import GenerationRecord, TrainingEnded
from varuna.fleet.state.script import Script
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.starts import Starts
from varuna.fleet.state.stutter import NO_EVIDENCE
from varuna.fleet.state.worker import Worker, WorkerStatus, changed
from varuna.fleet.state.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Everything that decisions depend on, besides the event and the time."""

    config: FleetConfig
    phase: Phase
    contacts: Contacts
    starts: Starts
    workers: Workers = field(default_factory=Workers)
    machines: Machines = field(default_factory=Machines)
    speeds: Speeds = field(default_factory=Speeds)
    script: Script = field(default_factory=Script)
    generations: Generations = field(default_factory=Generations)
    recorded: RecordedSteps = field(default_factory=RecordedSteps)
    requests: Requests = field(default_factory=Requests)
    questions: Questions = field(default_factory=Questions)
    experience: MorphHistory
    loss_rate: LossRate

    @staticmethod
    def empty(config: FleetConfig, now_s: float) -> "Fleet":
        """Before any worker exists."""
        return Fleet(
            config=config,
            phase=Idle(since_s=now_s),
            contacts=Contacts(ticked_s=now_s, heard_s=now_s, listened_s=now_s),
            starts=Starts(wanted=0 if config.elastic else config.workers),
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
                trained=worker.trained or any(worker.name in record.ranks for record in self.generations.history),
                holding=None,
                ran=None,
                settled=None,
                compute_s=None,
                speed_adjusted_s=None,
                evidence=NO_EVIDENCE,
                lead=NO_EVIDENCE,
                recent_s=(),
            )
            for worker in self.workers.values()
        ]
        began = self.generation + 1
        return replace(
            self,
            phase=Idle(since_s=now_s),
            contacts=self.contacts.unproved().expiring(float("-inf")),
            workers=Workers(workers),
            speeds=self.speeds.of_next_training(),
            script=self.script.at_next_training(ended),
            generations=Generations(began=began),
            recorded=RecordedSteps(lineage=began),
            requests=self.requests.of_next_training(),
            questions=self.questions.anew(),
        )

    @property
    def listened_s(self) -> float:
        """The time on the clock for silence."""
        return self.contacts.listened_s

    @property
    def job(self) -> JobFacts | None:
        """The job of the present training, once a worker has joined."""
        return self.script.job

    @property
    def history(self) -> tuple[GenerationRecord, ...]:
        """Generations of the present training."""
        return self.generations.history

    @property
    def training(self) -> int:
        """Number of the script's training that runs, from 0."""
        return len(self.script.trainings)

    @property
    def record(self) -> GenerationRecord:
        """The newest generation; there must be one."""
        return self.generations.history[-1]

    def record_of(self, generation: int) -> GenerationRecord | None:
        """A generation of the present training; None if it is none."""
        index = generation - self.generations.began
        return self.generations.history[index] if 0 <= index < len(self.generations.history) else None

    @property
    def generation(self) -> int:
        """Number of the newest generation; -1 before the first. Numbers go on from one training to the next."""
        return self.generations.began + len(self.generations.history) - 1

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
        return self.record.members if self.generations.history else ()

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
            short = self.machines.short.get(device_of(device_class), ShortMemory(times=0, generation=0))
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
            for node, zone in self.machines.zones.items()
            if any(self.workers[name].is_joined for name in self.workers.on(node))
        }

    @property
    def live_members(self) -> tuple[str, ...]:
        """Members of the newest generation that can still answer, by rank."""
        return tuple(name for name in self.members if self.is_joined(name))

    @property
    def is_leaving(self) -> bool:
        """Whether a rank of the newest generation reached the end of its loop."""
        return any(self.record.has_seat(name) for name in self.generations.departed)

    @property
    def is_orphaned(self) -> bool:
        """Whether a training is over, and all who have ended it are gone before their scripts came to an end."""
        return isinstance(self.phase, Finishing) and not (self.workers.unfinished or self.script.ended)

    @property
    def missing(self) -> int:
        """Workers that should exist and do not: once a rank is through, nobody else is needed to end the script."""
        if self.is_leaving and not self.is_orphaned:
            return 0
        starts, workers, replaces = self.starts, self.workers, self.config.replace
        leaving = sum(len(workers.on(node)) for node in self.machines.departing) if replaces else 0
        # A launcher may have nothing but a leaving node to start them on: twice as many at most.
        most = min(starts.wanted + leaving, 2 * starts.wanted) - len(workers)
        return max(0, most - (len(self.resting) if replaces else 0) - starts.spawning)

    @property
    def resting(self) -> tuple[str, ...]:
        """Lost workers whose GPUs have failed, and get no other worker yet."""
        broken, now_s = self.machines.broken.values(), self.contacts.ticked_s
        return tuple(name for each in broken if now_s < each.until_s for name in each.workers)

    @property
    def is_starting(self) -> bool:
        """Whether a worker is warming up."""
        return self.workers.count(WorkerStatus.STARTING) > 0

    @property
    def more_to_come(self) -> bool:
        """Whether a worker is starting or will be."""
        return self.is_starting or self.starts.spawning > 0 or self.missing > 0 or self.config.elastic

    @property
    def available(self) -> tuple[str, ...]:
        """Joined workers that new plans should use: in touch, and neither about to leave nor slow."""
        return tuple(name for name in self.joined if self.is_available(name))

    def is_available(self, name: str) -> bool:
        """Return whether new plans should use a worker that has joined."""
        return name not in self.speeds.slow and self._stays(name)

    @property
    def staying(self) -> tuple[str, ...]:
        """Joined workers that are in touch and do not leave, slow ones too."""
        return tuple(filter(self._stays, self.joined))

    @property
    def in_touch(self) -> tuple[str, ...]:
        """Joined workers that could be told of a part now, those about to leave too."""
        return tuple(filter(self.is_in_touch, self.joined))

    def is_in_touch(self, name: str) -> bool:
        """Return whether a worker could be told of a part now: both connections are open, and its machine is heard.

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
        return self.speeds.slow[name].speed if name in self.speeds.slow else 1.0

    def seen_s(self, worker: Worker) -> float:
        """Return when a worker was last known to live: by its own word, or by a step that was committed."""
        return max(worker.seen_s, self.contacts.progressed_s) if worker.seated and worker.is_joined else worker.seen_s

    def is_parted(self, node: str) -> bool:
        """Return whether the connection to a machine ended, and nothing has shown since that its workers live."""
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
        """Return whether a machine is out of sight."""
        return self.unheard_s(node) > self.config.lease_s

    def is_departing(self, name: str) -> bool:
        """Return whether a worker's node is about to leave."""
        return self.workers[name].node in self.machines.departing

    def without_risk(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these workers whose nodes no cloud advises to replace."""
        return tuple(name for name in names if self.workers[name].node not in self.machines.at_risk)

    def is_joined(self, name: str) -> bool:
        """Return whether ``name`` is alive and takes directives."""
        return name in self.workers and self.workers[name].standing is WorkerStatus.JOINED

    def rank_of(self, name: str) -> int | None:
        """Rank in the newest generation."""
        return self.record.ranks.get(name) if self.generations.history else None

    def is_member(self, name: str) -> bool:
        """Return whether a worker, lost or not, belongs to the newest generation."""
        return bool(self.generations.history) and name in self.record.ranks
