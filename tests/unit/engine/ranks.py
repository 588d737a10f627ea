"""Ranks as threads of one process: real groups, links, votes and sessions, without starting processes."""

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.captures import CAPTURES
from tests.depth import by_depth
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from varuna.checkpoint.io.section_state import from_bytes, to_bytes
from varuna.core.devices import WorkerGroups
from varuna.core.model import JobFacts, Memory
from varuna.core.plan import Pipeline, Plan
from varuna.core.precision import Precision
from varuna.data.samples import SampleSource
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, local_store
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.links.traffic import TransferPaths, traffic_of
from varuna.engine.pipeline.timeline import StepTimes
from varuna.engine.stage.job import Job
from varuna.engine.stage.precision import DTYPES, cast
from varuna.engine.worker.forming import WorkerContext
from varuna.engine.worker.loop_state import Committed, LoopState
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.initial.initial_values import Init, begin_with
from varuna.partition.lengths import partition_lengths
from varuna.partition.model import PartitionedModel
from varuna.partition.on_device import on_device
from varuna.planner.choose import plan_run
from varuna.testing.threads import run_all


def reaped(bound_s: float = 5.0, *begins: str) -> None:
    """Wait for what aborts NCCL's communicators, and for threads whose names begin so."""
    deadline_s, names = time.monotonic() + bound_s, ("varuna-abort", *begins)
    while any(thread.name.startswith(names) for thread in threading.enumerate()) and time.monotonic() < deadline_s:
        time.sleep(0.001)  # not join(): one of them may be about to start


# What comes back from C++ into a finalising interpreter aborts it: loaders and formings that a test left.
atexit.register(reaped, 5.0, "varuna-loader", "varuna-forming", "varuna-export")

_sessions: list[tuple[Session, Any]] = []
"""Sessions that run, or ran, in the present test."""

_captured: dict[object, PartitionedModel] = {}
"""By what decides on the graph (an optimizer only adds bytes to it); all datasets here give batches of one form."""

_plans: dict[tuple[object, ...], Plan] = {}
"""By the job and what else decides on it: each rank would make the same one again."""
_planning = threading.Lock()


STEPS = by_depth(2, 4)
"""of a run whose test does not say"""


@dataclass
class Setup:
    """A job, captured once in this process and run in any plan."""

    build: Callable[[], nn.Module] = SmallLanguage
    dataset: Any = field(default_factory=Tokens)
    optimizer: Any = adamw
    global_batch: int = 8
    micro_batch: int = 2
    seed: int = 0
    clip: float | None = 1.0
    scheduler: Any = None
    weight: Any = None
    metrics: Any = None
    frozen: Any = None
    before_step: Any = None
    after_step: Any = None
    policy: str = "varuna"
    adjusted: Callable[[Plan], Plan] | None = None
    """changes the plan that the planner made"""
    directory: str | None = None
    init: Init = "constructor"
    weights: Path | None = None
    collate: Any = None
    lengths: tuple[int, ...] = ()
    precision: Precision = "fp32"
    unit: float = 1.0
    compiler: Compiler | None = None
    offload: bool = False
    stream: bool = False
    rounds: bool = False
    device: str = "cpu"
    traffic: Callable[[], TransferPaths] | None = None
    """of each rank; the device's by default"""
    share: bool = False
    patience: Patience | None = None

    def __post_init__(self) -> None:
        self.recipe = Recipe(self.build, metrics=self.metrics, dtype=DTYPES[self.precision])
        self.source = SampleSource(self.dataset, seed=self.seed, collate=self.collate)
        key = (self.build, self.metrics, self.lengths, self.precision, self.after_step)
        if key not in _captured:
            batch = self.source.micro_batch(range(2)).tensors
            _captured[key] = CAPTURES.captured(
                lambda: partition_lengths(
                    self.recipe, batch, self.lengths, optimizer=adamw, after_step=self.after_step
                ),
                *key,
            )
        self.model = _captured[key]
        self.beginning = begin_with(
            self.recipe,
            self.model.shapes,
            seed=self.seed,
            init=self.init,
            weights=self.weights,
            digest=self.model.facts.digest,
        )

    @property
    def combines(self) -> bool:
        return self.before_step is not None or self.optimizer is not adamw

    def facts(self, steps: int) -> JobFacts:
        return JobFacts(
            model=self.model.facts,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            seed=self.seed,
            steps=steps,
            metrics=self.model.metrics,
            checkpoint_dir=self.directory,
            precision=self.precision,
            combines=self.combines,
            compiled=None if self.compiler is None else "test",
            memory=self.memory,
        )

    @cached_property
    def _buffers(self) -> dict[str, Tensor]:
        needed = needed_buffers(self.model)
        return self.beginning.buffers(needed) if needed else {}

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        return self.beginning.parameters(self.model.shapes)

    @property
    def memory(self) -> Memory:
        return Memory(offload_optimizer=self.offload, shard_optimizer=self.share, stream_frozen=self.stream)

    def job(self) -> Job:
        device = torch.device(self.device)
        return Job(
            model=on_device(self.model, device),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seed=self.seed,
            clip_grad_norm=self.clip,
            frozen=self.frozen,
            before_step=self.before_step,
            after_step=self.after_step,
            buffers={name: cast(value.clone().to(device), self.recipe.dtype) for name, value in self._buffers.items()},
            device=device,
            dtype=self.recipe.dtype,
            unit=self.unit,
            compiler=self.compiler,
            memory=self.memory,
            bf16_reduction=self.rounds,
            traffic=self.traffic() if self.traffic else traffic_of(device),
        )

    def initial(self, rank: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        if self.beginning.name != "constructor":  # those two make each rank's own only
            return self.beginning.parameters(names)
        return {name: self._parameters[name].clone() for name in names}

    def session(
        self, membership: Any, store: Any, steps: int, saver: Any = None, rank: int = 0, publisher: Any = None
    ) -> Session:
        if self.beginning.name == "constructor":
            _ = self._parameters  # made before ranks run: it is not theirs
        context = WorkerContext(
            self.job(),
            SampleSource(self.dataset, seed=self.seed, collate=self.collate),
            self.weight,
            steps,
            initial=lambda names, _checks: self.initial(rank, names),
            connect=lambda _assignment: store,
            endpoint=Endpoint("127.0.0.1"),
            loop=LoopState(),
        )
        session = Session(
            context, self.facts(steps), membership, saver=saver, publisher=publisher, patience=self.patience
        )
        _sessions.append((session, saver))
        return session

    def run(self, stages: int, replicas: int, steps: int = STEPS, *, size: int | None = None) -> list[list[Committed]]:
        """Train on ``stages * replicas`` threads, or ``size`` of them; what each rank committed."""
        store = local_store()
        size = size or stages * replicas
        committed: list[list[Committed]] = [[] for _ in range(size)]
        sessions = []

        def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
            key = (job.model_dump_json(), workers, stages, micro_batch, self.policy)
            with _planning:
                if key not in _plans:
                    _plans[key] = plan_run(
                        job, workers=workers, stages=stages, micro_batch=micro_batch, policy=self.policy
                    )
            return self.adjusted(_plans[key]) if self.adjusted else _plans[key]

        for rank in range(size):
            solo = StaticMembership(World(rank, size, store, "127.0.0.1", 0), plan)
            sessions.append(self.session(solo, store, steps, rank=rank))
        run_all([partial(committed[rank].extend, sessions[rank].steps()) for rank in range(size)])
        self.finished = sessions
        shape = committed[0][0].plan
        assert (shape.stages, shape.replicas) == (stages, replicas)
        return committed

    def losses(
        self, stages: int, replicas: int, steps: int = STEPS, *, size: int | None = None
    ) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step, checked to be the same number on every rank."""
        committed = self.run(stages, replicas, steps, size=size)
        curves = [[(each.totals.loss, each.totals.grad_norm) for each in rank] for rank in committed]
        assert len(set(map(repr, curves))) == 1  # as text: NaN differs from itself
        return curves[0]

    def on_pipelines(self, *depths: int, steps: int = STEPS) -> list[tuple[float, float]]:
        """Train on pipelines of these depths: losses and norms; ``finished`` is set."""
        if len(set(depths)) == 1:
            return self.losses(depths[0], len(depths), steps)
        before, self.adjusted = self.adjusted, unlike(*depths)
        try:
            return self.losses(depths[0], len(depths), steps, size=sum(depths))
        finally:
            self.adjusted = before

    def buffers(self) -> dict[str, Tensor]:
        """Updated buffers of the last run, checked to have the same bits wherever they are held."""
        found: dict[str, Tensor] = {}
        for session in self.finished:
            assert session.current is not None
            for name, value in session.current.stage.buffers.items():
                assert torch.equal(found.setdefault(name, value), value), name
        return found

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters of the last run, from whichever rank holds them."""
        found: dict[str, Tensor] = {}
        for session in self.finished:
            assert session.current is not None
            found.update({name: value.detach() for name, value in session.current.stage.parameters.items()})
        return found

    def states(self) -> dict[str, Tensor]:
        """Every tensor of every section that some rank holds, checked to be the same wherever it is held."""
        found: dict[str, Tensor] = {}
        for session in self.finished:
            assert session.current is not None
            stage = session.current.stage
            for section in stage.sharding.held:
                state = from_bytes(to_bytes(stage.state_of(section)))
                held = {f"{section}/{name}": value for name, value in state.tensors.items()}
                assert all(torch.equal(found[name], value) for name, value in held.items() if name in found), section
                found.update(held)
        return found

    def times(self) -> list[StepTimes | None]:
        """Return the times of each rank in the last step of the last run."""
        return [session.current.runtime.times for session in self.finished if session.current is not None]


def unlike(*depths: int, paces: tuple[float, ...] = ()) -> Callable[[Plan], Plan]:
    """Turn a plan into one of pipelines of these depths, each cut evenly."""

    def adjusted(plan: Plan) -> Plan:
        def even(stages: int, pace: float) -> Pipeline:
            bounds = tuple(plan.sections * stage // stages for stage in range(stages + 1))
            return Pipeline(
                pace=pace, bounds=bounds, stash_limits=tuple(3 * (stages - stage) for stage in range(stages))
            )

        pipelines = tuple(map(even, depths, (1.0, *(paces or (1.0,) * (len(depths) - 1)))))
        return Plan.model_validate({**dict(plan), "pipelines": pipelines})

    return adjusted


def dealt(*speeds: float) -> Callable[[Plan], Plan]:
    """Turn a plan into one whose replicas have these speeds."""
    return lambda plan: plan.with_each_pipeline(speeds=speeds)


def close_sessions() -> None:
    """End the threads and sockets of all sessions."""
    if not _sessions:
        return
    while _sessions:
        session, saver = _sessions.pop()
        if session.current is not None:
            session.current.close()
            session.current = session.heartbeat.runtime = None  # a test's job refers to its sessions, and they to it
        if saver is not None:
            saver.close()
    reaped()


def connected(size: int) -> list[Group]:
    """Real groups of ``size`` members in this process."""
    store = local_store()
    groups: dict[int, Group] = {}

    def connect(rank: int) -> None:
        groups[rank] = Group(store, "test", rank, size, Endpoint("127.0.0.1"))

    run_all([partial(connect, rank) for rank in range(size)])
    return [groups.pop(rank) for rank in range(size)]


@contextmanager
def single_threaded() -> Iterator[None]:
    """One intra-op thread, as in every way of launching."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
