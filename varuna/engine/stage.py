"""A stage on one rank: its sections' parameters, gradient buffers, optimizer and computations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from varuna.checkpoint.shards import SectionState
from varuna.core.plan import Plan
from varuna.engine.optimizer import NamedParameters, OptimizerFactory, SchedulerFactory, StageOptimizer
from varuna.engine.section import Examples, SectionRunner, Tape, Tensors, backward
from varuna.engine.shared import Exchange, StageExchange, Unprepared, Witness, installed
from varuna.partition.model import PartitionedModel

Results = tuple[Tensor, ...]
_NORM_RUN = 4096


@dataclass(frozen=True)
class Job:
    """What the user asked for, as the engine needs it: equal on all ranks and in all generations."""

    model: PartitionedModel
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    seed: int
    clip_grad_norm: float | None
    before_step: Callable[[NamedParameters], None] | None
    buffers: Mapping[str, Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32


class Bucket:
    """Gradients of one section in one flat buffer: accumulated, reduced and normed as a whole.

    Everything that sums does so per section, so merging or splitting stages cannot change a bit (DESIGN §5.2).
    """

    def __init__(self, leaves: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.names = tuple(leaves)
        sizes = [leaf.numel() for leaf in leaves.values()]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views = dict(zip(leaves, torch.split(self.flat, sizes) if sizes else (), strict=True))
        for name, leaf in leaves.items():
            self.views[name] = self.views[name].view(leaf.shape)
            leaf.grad = self.views[name]


class Stage:
    """Sections ``plan.sections_of(stage)`` on this rank's device."""

    def __init__(self, job: Job, plan: Plan, stage: int, states: Mapping[int, SectionState], next_step: int) -> None:
        """Take over the state of every section of the stage.

        Args:
            job: what the user asked for.
            plan: the generation's plan.
            stage: which stage of it.
            states: at least one state for each of its sections; storages are taken over, not copied.
            next_step: steps that the states contain.
        """
        self.job = job
        self.plan = plan
        self.index = stage
        self.sections = plan.sections_of(stage)
        self.is_last = stage == plan.stages - 1
        self.next_step = next_step
        graphs = [job.model.sections[section] for section in self.sections]
        self.parameters = _parameters(job, graphs, states)
        self.buckets: dict[int, Bucket] = {}
        self.runners: list[SectionRunner] = []
        crossings = {c.name: c for into in job.model.split.crossings for c in into}
        tied = {parameter.name for parameter in job.model.facts.tied}
        for graph in graphs:
            leaves = {
                name: self.parameters[name].detach().requires_grad_() if name in tied else self.parameters[name]
                for name in dict.fromkeys(graph.parameters)
                if name in job.model.trainable
            }
            self.buckets[graph.index] = Bucket(leaves, torch.float32, job.device)
            held = {**{name: self.parameters[name] for name in graph.parameters}, **leaves}
            fixed = [job.buffers[name] for name in graph.buffers]
            fixed += [job.model.constants[name].to(job.device) for name in graph.constants]
            tensors = Tensors(tuple(held[name] for name in graph.parameters), tuple(fixed))
            self.runners.append(SectionRunner(graph, tensors, crossings, job.seed))
        self.tied = [p for p in job.model.facts.tied if p.name in self.parameters and p.name in job.model.trainable]
        self.totals: dict[str, Tensor] = {p.name: torch.zeros_like(self.parameters[p.name]) for p in self.tied}
        self.optimizer = StageOptimizer(
            job.optimizer, job.scheduler, self.named_parameters(), _optimizer_state(states, self.sections), next_step
        )
        foreign = {p.name for p in self.tied if p.owner not in self.sections}
        self.owned = frozenset(id(value) for name, value in self.parameters.items() if name not in foreign)
        """ids of the parameters that this stage counts in what is shared with other stages"""
        self.witness = Witness()
        self._undo: Callable[[], None] | None = None  # puts back what was before a tentative step

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by the model's own names, each once, in the order of sections."""
        return [(name, value) for name, value in self.parameters.items() if name in self.job.model.trainable]

    # -- computation -------------------------------------------------------------------------------

    def forward(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int
    ) -> tuple[dict[str, Tensor], Results]:
        """F without a graph: what crosses into the next stage, or the last stage's results."""
        flowing = dict(values)
        made: Results = ()
        for runner in self.runners:
            made = runner.forward(flowing, examples, step, micro_batch)
            flowing = self._flow_on(flowing, runner, made)
        return flowing, made

    def record(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int
    ) -> tuple[dict[str, Tensor], Results, list[Tape]]:
        """R, or an F that keeps its graph: also what B needs."""
        flowing, tapes = dict(values), []
        for runner in self.runners:
            tape = runner.record(flowing, examples, step, micro_batch)
            tapes.append(tape)
            flowing = self._flow_on(flowing, runner, tuple(made.detach().contiguous() for made in tape.made))
        return flowing, tapes[-1].made, tapes

    def backward(
        self, tapes: list[Tape], gradients: dict[str, Tensor], section_done: Callable[[int], None]
    ) -> dict[str, Tensor]:
        """B: consume the tapes from the last section to the first; returns gradients of what was received."""
        while tapes:
            tape = tapes.pop()
            backward(tape, gradients)
            section_done(tape.section.index)
        return gradients

    def _flow_on(
        self, flowing: Mapping[str, Tensor], runner: SectionRunner, made: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Values that cross the cut behind a section; the rest is freed."""
        behind = runner.section.index + 1
        if behind == len(self.job.model.sections):
            return {}
        known = {**flowing, **dict(zip(runner.section.makes, made, strict=True))}
        return {crossing.name: known[crossing.name] for crossing in self.job.model.split.crossings[behind]}

    # -- gradients -----------------------------------------------------------------------------------

    def clear_gradients(self) -> None:
        """Start a step: sums at zero."""
        for bucket in self.buckets.values():
            bucket.flat.zero_()

    def squared_norm(self, section: int) -> float:
        """Squared L2 norm of the section's reduced gradients, float64; a tied parameter counts at its owner only."""
        bucket = self.buckets[section]
        tied = {p.name: p for p in self.tied}
        if not tied.keys() & set(bucket.names):
            return _squared(bucket.flat)
        own = sum(_squared(bucket.views[name]) for name in bucket.names if name not in tied)
        return own + sum(_squared(self.totals[p.name]) for p in self.tied if p.owner == section)

    def apply(self, step: int, scale: float, exchange: Exchange | None = None) -> None:
        """Scale the reduced gradients and step the optimizer: once per step, whatever is asked again.

        Args:
            step: to be applied.
            scale: factor of the gradients.
            exchange: answers ``all_reduce_shared`` instead of the engine: the tracer's.
        """
        if step < self.next_step:
            return
        assert step == self.next_step, f"step {step} cannot be applied on top of {self.next_step}"
        if self._undo is None:
            usual = Unprepared(self.owned) if self.plan.stages > 1 else self.witness
            with installed(exchange or usual):
                self._update(scale)
        self._undo = None
        self.optimizer.advance()
        self.next_step = step + 1

    def apply_tentatively(self, scale: float, exchange: StageExchange) -> None:
        """Apply a step before the vote on it, since the user's code talks to other stages meanwhile.

        ``apply`` then commits it without talking to anyone, and ``roll_back`` undoes it. Whatever is raised, the
        stage is as it was.
        """
        assert self._undo is None
        self._undo = self.optimizer.copies()
        try:
            with installed(exchange):
                self._update(scale)
            exchange.finish()
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """Undo a tentative step, bit for bit; nothing to do without one."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _update(self, scale: float) -> None:
        for bucket in self.buckets.values():
            bucket.flat.mul_(scale)
        for name, total in self.totals.items():
            self.parameters[name].grad = total.mul_(scale)
        if self.job.before_step is not None:
            self.job.before_step(self.named_parameters())
        self.optimizer.update()

    # -- state ---------------------------------------------------------------------------------------

    def state_of(self, section: int, *, owned_only: bool = False) -> SectionState:
        """A section's state as references (not copies); ``owned_only`` leaves out tied copies of another section."""
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {}
        foreign = {p.name for p in self.job.model.facts.tied if p.owner != section} if owned_only else set()
        for name in dict.fromkeys(self.job.model.sections[section].parameters):
            if name in foreign:
                continue
            tensors[f"parameters/{name}"] = self.parameters[name].detach()
            state, rest = self.optimizer.state_of(name)
            tensors.update({f"optimizer/{name}/{key}": value for key, value in state.items()})
            scalars.update({f"optimizer/{name}/{key}": value for key, value in rest.items()})
        return SectionState(section, tensors, scalars)


def _squared(values: Tensor) -> float:
    """Squared L2 norm: fp32 within short runs, float64 over them (float64 throughout costs 2 % of a step)."""
    flat = values.reshape(-1)
    whole = flat.numel() // _NORM_RUN * _NORM_RUN
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_RUN), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    return float(runs.square().sum() + rest.square())


def _parameters(job: Job, graphs: Sequence[Any], states: Mapping[int, SectionState]) -> dict[str, nn.Parameter]:
    """One parameter per name, in the order of sections; a tied one from the lowest section that has it."""
    parameters: dict[str, nn.Parameter] = {}
    for graph in graphs:
        for name in dict.fromkeys(graph.parameters):
            if name not in parameters:
                value = states[graph.index].tensors[f"parameters/{name}"].to(job.device, job.dtype)
                parameters[name] = nn.Parameter(value, requires_grad=name in job.model.trainable)
    return parameters


def _optimizer_state(states: Mapping[int, SectionState], sections: range) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter: ``optimizer/<name>/<key>`` entries of all sections."""
    found: dict[str, dict[str, Any]] = {}
    for section in reversed(sections):
        for path, value in (*states[section].tensors.items(), *states[section].scalars.items()):
            if path.startswith("optimizer/"):
                name, key = path.removeprefix("optimizer/").rsplit("/", 1)
                found.setdefault(name, {})[key] = value
    return found
