"""Outcome of a step before the optimizer: by the user's module, and by its sections as the engine runs them.

Both take micro-batches with their weights, and give the weighted mean's loss and gradients, and buffers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from varuna.checks.draws import SameDraws
from varuna.core.errors import ModelError
from varuna.data.randomness import seeded
from varuna.data.sizes import rows_in
from varuna.engine.stage.section import Examples, NoteTruths, SectionRunner, Tensors
from varuna.engine.stage.tape import Tape, backward, crossing
from varuna.partition.apply_updates import MicroBatchStatistics, apply_updates
from varuna.partition.capture.capture import LossModule
from varuna.partition.cut.split import SectionGraph
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.watching.side_effects import Respond, Seen, watched

Draws = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Part:
    """A micro-batch of a check."""

    tensors: Mapping[str, Tensor]
    indices: tuple[int, ...]
    """into the dataset"""
    weight: float
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """of the whole batch, where its loss has terms that count different things"""
    adds_up: bool = False
    """its loss, as sections make it, is its part of the whole batch's, rather than a mean"""

    @property
    def size(self) -> int:
        """Number of examples."""
        return rows_in(self.tensors)


@dataclass(frozen=True)
class Outcome:
    """Results of a step from some micro-batches, one after the other."""

    losses: tuple[float, ...]
    """of each"""
    loss: float
    """weighted mean"""
    gradients: Mapping[str, Tensor]
    """of the weighted mean, by parameter (first name); one that has none is missing"""
    buffers: Mapping[str, Tensor]
    """afterwards, by first name"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """sums over all micro-batches"""
    seen: Seen = field(default_factory=Seen)
    """other doings of user code"""


@contextmanager
def controlled(draws: Draws) -> Iterator[None]:
    """In this block, all draws are the same each time; Python's, NumPy's and torch's generators come back."""
    with seeded(0, "self-check"), draws():
        yield


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """After this block, buffers are as before, bit for bit, in the same tensors."""
    buffers = [
        (each, name, value, value.detach().clone())
        for each in module.modules()
        for name, value in each._buffers.items()
        if value is not None
    ]
    try:
        yield
    finally:
        for each, name, value, kept in buffers:
            each._buffers[name] = value
            value.detach().copy_(kept)


def plainly(losses: LossModule, parts: Sequence[Part], *, draws: Draws = SameDraws) -> Outcome:
    """Compute the outcome of the user's module, by autograd; its buffers are put back."""
    losses.zero_grad()
    found, sums, total = [], list[Mapping[str, float]](), _total(parts)
    with same_buffers(losses.model), controlled(draws), watched() as seen:
        for part in parts:
            loss, metrics = run_plainly(losses, part)
            found.append(float(loss.detach()))
            sums.append({name: float(value) for name, value in metrics.items()})
            if part.weight and loss.requires_grad:
                torch.autograd.backward([loss], [torch.full_like(loss, part.weight / total)])
        buffers = {name: value.detach().clone() for name, value in losses.model.named_buffers()}
    named = dict(losses.model.named_parameters())
    gradients = {name: _taken(value) for name, value in named.items() if value.grad is not None}
    losses.zero_grad()
    return Outcome(tuple(found), _mean(found, parts), gradients, buffers, _added(sums), seen)


def loss_again(losses: LossModule, part: Part, *, key: int = 0, respond: Respond | None = None) -> float:
    """The loss alone, with the same draws from torch; from Python and NumPy those of ``key``, or what is responded."""
    # Gradients stay enabled: what the loss contains may be one.
    with same_buffers(losses.model), seeded(key, "self-check"), watched(respond), SameDraws():  # type: ignore[no-untyped-call]
        return float(run_plainly(losses, part)[0].detach())


def run_plainly(losses: LossModule, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and the metric sums; its tensors stay as they are."""
    made: tuple[Tensor, dict[str, Tensor]] = losses({key: value.clone() for key, value in part.tensors.items()})
    return made


def _added(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(metrics[name] for metrics in each) for name in (each[0] if each else ())}


def in_turn(
    model: PartitionedModel,
    initial: Initial,
    parts: Sequence[Part],
    *,
    draws: Draws = SameDraws,
    at_once: bool = False,
) -> Outcome:
    """Return what the sections compute, one after the other; ``initial`` is only read.

    Args:
        model: as captured.
        initial: its values.
        parts: the micro-batches.
        draws: what random operations give.
        at_once: buffers are updated after all parts, as in a step; else after each, as if it were a step.
    """
    buffers = {name: value.detach().clone() for name, value in initial.buffers.items() if name not in model.aliases}
    sums: dict[str, Tensor] = {}
    found, noted, metrics, total = [], [], list[Mapping[str, float]](), _total(parts)
    with controlled(draws):
        for part in parts:
            graph = model.graphs[variant_of(model, part.tensors, part.indices)]
            (loss, *others), statistics = run_sections(graph, initial, buffers, part, _share(part, total), sums)
            found.append(float(loss))
            of_user = others[len(others) - len(model.metrics) :]
            metrics.append(dict(zip(model.metrics, map(float, of_user), strict=True)))
            noted.append(MicroBatchStatistics(part.size, statistics))
            if not at_once:
                _commit(graph, buffers, noted)
                noted.clear()
        if at_once:
            _commit(model, buffers, noted)
    mean = sum(each * _share(part, total) for each, part in zip(found, parts, strict=True) if part.weight)
    return Outcome(tuple(found), mean, sums, buffers, _added(metrics))


def _share(part: Part, total: float) -> float:
    """The weight of a part's loss, as sections make it."""
    return float(part.weight > 0) if part.adds_up else part.weight / total


def _total(parts: Sequence[Part]) -> float:
    return sum(part.weight for part in parts) or 1.0


def _mean(losses: Sequence[float], parts: Sequence[Part]) -> float:
    """The weighted mean; a mean over no targets is NaN and counts nothing."""
    return sum(loss * part.weight for loss, part in zip(losses, parts, strict=True) if part.weight) / _total(parts)


def _taken(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, which has none afterwards: a copy would take the memory of another model."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def run_sections(
    model: PartitionedModel,
    initial: Initial,
    buffers: Mapping[str, Tensor],
    part: Part,
    share: float,
    sums: dict[str, Tensor],
    guard: NoteTruths | None = None,
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Results and statistics of one micro-batch; its gradients, times its share of the weight, are added to ``sums``.

    Results are the loss, the number of targets if they are counted, and the metrics.

    Args:
        model: the graph for the part's length.
        initial: the whole model with initial values.
        buffers: newest values, by first name.
        part: the micro-batch.
        share: what its gradients are multiplied by.
        sums: by parameter; gradients are added in place.
        guard: is told whether branches went as they were captured.
    """
    crossings = {each.name: each for into in model.split.crossings for each in into}
    examples = Examples({**part.tensors, **part.numbers}, part.size)
    values: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    tapes: list[Tape] = []
    leaves: list[dict[str, Tensor]] = []

    def note(section: int, micro_batch: int, found: Sequence[Tensor]) -> None:
        names = (each.name for each in model.sections[section].statistics)
        statistics.update(zip(names, (value.detach() for value in found), strict=True))

    for section in model.sections:
        mine = {
            name: initial.parameters[name].detach().requires_grad_(name in model.trainable)
            for name in section.parameters
        }
        fixed = [buffers[name] for name in section.buffers] + [model.constants[name] for name in section.constants]
        tensors = Tensors(tuple(mine[name] for name in section.parameters), tuple(fixed))
        with unwritten(section, {**{name: values[name] for name in section.takes}, **examples.inputs}):
            tape = SectionRunner(section, tensors, crossings, 0, note=note, guard=guard).record(values, examples, 0, 0)
        values.update(zip(section.makes, crossing(tape.made), strict=True))
        tapes = [*tapes, tape] if share else [tape]  # without a backward, the graphs of others are not needed
        leaves.append(mine)
    loss = tapes[-1].made[0].detach()
    if share:
        gradients = {model.sections[-1].makes[0]: torch.full_like(loss, share)}
        for tape in reversed(tapes):
            backward([tape], gradients)
    for mine in leaves:
        for name, leaf in mine.items():
            if leaf.grad is not None:
                found = _taken(leaf)
                sums[name] = sums[name] + found if name in sums else found
    return tuple(value.detach() for value in tapes[-1].made), statistics


@contextmanager
def unwritten(section: SectionGraph, given: Mapping[str, Tensor]) -> Iterator[None]:
    """In this block, a section runs that must leave what it is given as it is: it runs again, on the same tensors.

    Raises:
        ModelError: it wrote to some of it in place.
    """
    before = {name: value._version for name, value in given.items()}
    yield
    written = sorted(name for name, value in given.items() if value._version != before[name])
    if written:
        raise ModelError(
            f"section {section.index} ({section.label}) writes in place to {', '.join(written)}, which it is given. It "
            "runs more than once (forward, recompute), and would find other values the second time. Write to a clone "
            "there (x = x * 2 instead of x *= 2), and please report this: capture should have noticed."
        )


def _commit(model: PartitionedModel, buffers: Mapping[str, Tensor], found: Sequence[MicroBatchStatistics]) -> None:
    apply_updates((update for section in model.sections for update in section.updates), buffers, found)
