"""A small job, a planner that likes many workers, and a driver for the state machine."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from varuna.core import devices
from varuna.core.devices import WorkerGroups, equal_workers, size_of
from varuna.core.errors import NoPlanError
from varuna.core.messages import (
    Assign,
    Assignment,
    Beat,
    FromWorker,
    Hello,
    Leaving,
    StopReport,
    Suspect,
    Vote,
    Voted,
    WorkerPhase,
)
from varuna.core.model import JobFacts, ModelFacts, SectionFacts
from varuna.core.node_notices import PreemptionNotice
from varuna.core.plan import Pipeline, Plan
from varuna.core.vote import VoteLayout
from varuna.fleet.machine.advance import advance
from varuna.fleet.machine.placement import Candidate, Holdings
from varuna.fleet.manager.answering import plan_answer
from varuna.fleet.net.protocol import Identity
from varuna.fleet.run_folder.registry import Registry, hashed
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    AnswerReceived,
    Event,
    Heard,
    MessageReceived,
    NoticeReceived,
    Tick,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Ask, Instruction, Publish, Send, Spawn
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.questions import Checkpoint, FoundCheckpoint, WhichCheckpoint
from varuna.fleet.state.run_events import GenerationRecord, RunEvent

T = TypeVar("T")
E = TypeVar("E", bound=RunEvent)


def with_history(fleet: Fleet, history: Iterable[GenerationRecord]) -> Fleet:
    """A fleet that has had these generations."""
    return replace(fleet, generations=replace(fleet.generations, history=tuple(history)))


Machine = Callable[[Fleet, Event, float], tuple[Fleet, list[Instruction]]]
"""A function like ``advance``."""


@cache
def make_job(*, sections: int = 4, steps: int = 100, seed: int = 0, micro_batch: int | None = None) -> JobFacts:
    section = SectionFacts(
        label="s",
        forward_s=1.0,
        parameter_bytes=100,
        trainable_bytes=100,
        optimizer_bytes=200,
        activation_bytes=10,
        boundary_bytes=1,
    )
    model = ModelFacts(digest="d", sections=(section,) * sections)
    return JobFacts(model=model, global_batch=16, micro_batch=micro_batch, seed=seed, steps=steps)


def make_plan(
    job: JobFacts, workers: int | WorkerGroups, micro_batch: int | None, *, stages: int | None = None
) -> Plan:
    sections, groups = len(job.model.sections), equal_workers(workers) if isinstance(workers, int) else workers
    count = size_of(groups)
    depth = stages or min(count, sections)
    if count < depth:
        raise NoPlanError(f"{depth} stages need {depth} workers, {count} are there")
    replicas = count // depth
    even = Plan(
        micro_batch=micro_batch or 2,
        global_batch=job.global_batch,
        pipelines=(
            Pipeline(
                replicas=replicas,
                bounds=(*tuple(stage * sections // depth for stage in range(depth)), sections),
                stash_limits=(2,) * depth,
            ),
        ),
    )
    dealt = even.at_speeds(groups)
    return dealt.model_copy(update={"step_s": 1.0 / (depth * (sum(dealt.speeds) or replicas))})


def two_stages(job: JobFacts, workers: int | WorkerGroups, micro_batch: int | None) -> Plan:
    return make_plan(job, workers, micro_batch, stages=2)


def unlike_pipelines(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """Two pipelines that use all workers, one a stage deeper if they are odd."""
    sections = len(job.model.sections)
    count = size_of(workers)
    deep, shallow = min(sections, -(-count // 2)), min(sections, count // 2)
    if deep == shallow or not shallow:
        return make_plan(job, workers, micro_batch, stages=shallow or deep)
    first = make_plan(job, 2 * deep, micro_batch, stages=deep)
    starts = tuple(stage * sections // shallow for stage in range(shallow))
    other = Pipeline(pace=shallow / deep, bounds=(*starts, sections), stash_limits=(2,) * shallow)
    return Plan.model_validate(
        {**dict(first), "pipelines": (first.first.model_copy(update={"replicas": 1}), other)}
    ).at_speeds(workers)


def by_class(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """A pipeline on each class of devices, of at most two stages and its fastest workers."""
    depths = {name: min(2, size_of(groups)) for name, groups in devices.by_class(workers).items()}
    if not any(depths):
        return two_stages(job, workers, micro_batch)
    plans = {name: make_plan(job, depth, micro_batch, stages=depth) for name, depth in depths.items()}
    deepest_first = sorted(plans.items(), key=lambda each: -each[1].stages)
    pipelines = tuple(
        plan.first.model_copy(update={"device_class": name, "pace": 0.5 if number else 1.0})
        for number, (name, plan) in enumerate(deepest_first)
    )
    changed = {"pipelines": pipelines, "step_s": 1.0 / sum(depths.values())}
    made = Plan.model_validate({**dict(next(iter(plans.values()))), **changed})
    return made.at_speeds(workers)


def make_vote(plan: Plan, generation: int, step: int) -> Vote:
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches)
    vector = [0.0] * layout.size
    vector[layout.micro_batch(0)] = float(step)
    vector[layout.micro_batch(0) + 1] = 1.0
    return Vote(generation=generation, step=step, vector=tuple(vector), wall_s=0.5)


@dataclass
class Driver:
    """Feeds events to the machine, spawns what it asks for, and remembers all instructions."""

    config: FleetConfig
    plan: Callable[[JobFacts, WorkerGroups, int | None], Plan] = make_plan
    job: JobFacts = field(default_factory=make_job)
    checkpoint: Checkpoint | None = None
    predicted_s: Callable[[Plan], float] = lambda plan: plan.step_s
    now_s: float = 0.0
    done: list[Instruction] = field(default_factory=list)
    names: int = 0
    spawns: bool = True
    node_of: Callable[[str], str] = lambda worker: "local"
    class_of: Callable[[str], str] = lambda worker: ""
    answers: Callable[[], bool] = lambda: True
    """Whether a question is answered now; if not, a later tick asks again, in the order of the questions."""
    open: list[Ask] = field(default_factory=list)
    machine: Machine = advance

    def __post_init__(self) -> None:
        self.fleet = Fleet.empty(self.config, self.now_s)
        self.feed(Tick())

    def feed(self, event: Event) -> list[Instruction]:
        """Apply one event; returns the instructions of this event alone."""
        self.fleet, instructions = self.machine(self.fleet, event, self.now_s)
        asks = [instruction for instruction in instructions if isinstance(instruction, Ask)]
        instructions = [instruction for instruction in instructions if not isinstance(instruction, Ask)]
        self.done.extend(instructions)
        for ask in asks:
            if self.answers():
                instructions += self.feed(self.answer(ask))
            else:
                self.open.append(ask)
        if isinstance(event, Tick) and self.open and self.answers():
            instructions += self.feed(self.answer(self.open.pop(0)))
        for instruction in instructions:
            if isinstance(instruction, Spawn) and self.spawns:
                for _ in range(instruction.count):
                    name = f"w{self.names}"
                    self.names += 1
                    self.feed(WorkerSpawned(name, self.node_of(name)))
        return instructions

    def answer(self, ask: Ask) -> AnswerReceived:
        """Answer as the shell would."""
        question = ask.question
        if isinstance(question, WhichCheckpoint):
            return AnswerReceived(question, ask.number, FoundCheckpoint(self.checkpoint))
        made = plan_answer(self.plan, self.predicted_s, question, ask.job, ask.running)
        return AnswerReceived(question, ask.number, made)

    def say(self, worker: str, message: FromWorker) -> list[Instruction]:
        return self.feed(MessageReceived(worker, message))

    def hello_of(self, worker: str, **changes: Any) -> Hello:
        job = self.job.model_copy(update=changes)
        return Hello(worker=worker, pid=1, version="1", job=job, device_class=self.class_of(worker))

    def hello(self, worker: str, **changes: Any) -> list[Instruction]:
        return self.say(worker, self.hello_of(worker, **changes))

    def kill(self, worker: str, code: int = -9, stderr: str = "") -> list[Instruction]:
        return self.feed(WorkerExited(worker, code, stderr))

    def feed_tick(self) -> list[Instruction]:
        return self.feed(Tick())

    def wait(
        self,
        seconds: float,
        *,
        silent: tuple[str, ...] = (),
        hidden: tuple[str, ...] = (),
        activity: str = "waits",
        at_work: tuple[str, ...] = (),
        phase: WorkerPhase = WorkerPhase.OTHER,
        whole: bool = True,
        still: bool = True,
    ) -> list[Instruction]:
        """Let time pass in ticks, as the shell does; all but the ``silent`` workers send heartbeats.

        The workers of ``hidden`` machines are silent, and so are the machines. ``still``: whoever is heard waits,
        but those ``at_work``.
        """
        start = len(self.done)
        begin_s, end_s = self.now_s, self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.2)
            waits_s = self.now_s - begin_s if still else 0.0
            for worker in (name for name in self.fleet.joined if self.fleet.workers[name].node not in hidden):
                if worker not in silent:
                    generation, works = self.fleet.generation, worker in at_work
                    wait_s = 0.0 if works else waits_s
                    beat = Beat(
                        generation=generation,
                        step=0,
                        activity=activity,
                        at_work=works,
                        phase=phase,
                        whole=whole,
                        waits_s=wait_s,
                    )
                    self.say(worker, beat)
            for node in {worker.node for worker in self.fleet.workers.values()} - set(hidden):
                self.feed(Heard((node,)))
            self.feed(Tick())
        return self.done[start:]

    def breaks(self, next_steps: dict[str, int | None]) -> None:
        """The newest generation cannot form, and all of its members answer that."""
        self.say(self.fleet.live_members[0], Suspect(generation=self.fleet.generation, reason="connection timed out"))
        self.wait(1.2, still=False)
        for name in self.fleet.live_members:
            self.held(name, next_steps[name])

    def gather(self) -> None:
        """All launched workers say Hello: the first generation starts."""
        for number in range(self.config.workers):
            self.hello(f"w{number}")

    def begin(self, *steps: int) -> None:
        """The first generation starts, and records these steps."""
        self.gather()
        self.voted(*steps)

    def vote(self, step: int) -> Vote:
        return make_vote(self.fleet.record.plan, self.fleet.generation, step)

    def voted(self, *steps: int) -> None:
        """Rank 0 reports steps."""
        for step in steps:
            self.say(self.fleet.members[0], Voted(vote=self.vote(step)))

    def held(self, worker: str, next_step: int | None, *, votes: tuple[Vote, ...] = ()) -> list[Instruction]:
        """A worker answers with the sections of its seat in the newest generation."""
        sections = self.seat_sections(worker) if next_step is not None else ()
        return self.say(
            worker,
            StopReport(generation=self.fleet.generation, next_step=next_step, sections=sections, votes=votes),
        )

    def all_held(self, next_step: int) -> None:
        """All members that live answer: those with a seat, that they are before this step."""
        for worker in self.fleet.live_members:
            self.held(worker, next_step if self.seat_sections(worker) else None)

    def seat_sections(self, worker: str) -> tuple[int, ...]:
        plan, rank = self.fleet.record.plan, self.fleet.rank_of(worker)
        if rank is None or rank >= plan.workers:
            return ()
        return tuple(plan.sections_at(rank))

    def leave(self, *workers: str) -> None:
        for worker in workers:
            self.say(worker, Leaving(step=self.fleet.recorded.step + 1))

    @property
    def assignments(self) -> dict[str, Assignment]:
        """The newest assignment of each worker."""
        return {
            item.worker: item.message.assignment
            for item in self.done
            if isinstance(item, Send) and isinstance(item.message, Assign)
        }

    @property
    def end(self) -> Ended | None:
        return self.fleet.phase if isinstance(self.fleet.phase, Ended) else None

    def told(self, kind: type[E]) -> list[E]:
        """Published events of one type."""
        return [item.event for item in self.done if isinstance(item, Publish) and isinstance(item.event, kind)]


def sends(instructions: list[Instruction], kind: type[T]) -> list[tuple[str, T]]:
    """Messages of one type, with their receivers."""
    return [
        (item.worker, item.message)
        for item in instructions
        if isinstance(item, Send) and isinstance(item.message, kind)
    ]


def join(registry: Registry, token: str = "", hostname: str = "vm") -> Identity:
    """As a machine does: with a secret of its own."""
    secret = secrets.token_urlsafe(16)
    return Identity(node=registry.join(token or registry.mint(), hostname, hashed(secret)), secret=secret)


def preempted(node: str, in_s: float) -> NoticeReceived:
    """The cloud takes a node back."""
    return NoticeReceived(node, PreemptionNotice(in_s=in_s, reason="preemption notice"))


def candidates(
    names: Iterable[str],
    whole: Holdings | None = None,
    *,
    lent: Holdings | None = None,
    ran: Holdings | None = None,
    speeds: Mapping[str, float] | None = None,
    **places: Mapping[str, str],
) -> list[Candidate]:
    """Workers that may be seated; ``places`` are nodes, zones and classes by worker."""
    words = {"nodes": "node", "zones": "zone", "classes": "device_class"}
    return [
        Candidate(
            name,
            whole=(whole or {}).get(name, frozenset()),
            lent=(lent or {}).get(name, frozenset()),
            ran=(ran or {}).get(name, frozenset()),
            speed=(speeds or {}).get(name, 1.0),
            **{words[kind]: at.get(name, "") for kind, at in places.items()},
        )
        for name in names
    ]
