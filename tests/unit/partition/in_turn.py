"""Sections run in turn in one process, against the plain eager model: loss, gradients and buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.unit.partition.families import Family, Samples
from varuna.data.samples import SampleSource
from varuna.engine.stage.section import Examples, SectionRunner, Tensors
from varuna.engine.stage.tape import backward, crossing
from varuna.partition.apply_updates import MicroBatchStatistics, apply_updates
from varuna.partition.batch_weight import numbers_of
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.initial.constructor import Initial, materialise
from varuna.partition.model import CutChooser, PartitionedModel, partition


def run_in_turn(
    model: PartitionedModel, initial: Initial, buffers: dict[str, Tensor], tensors: dict[str, Tensor], size: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one micro-batch, F of all sections, then R and B; ``buffers`` change as at a commit."""
    crossings = {c.name: c for into in model.split.crossings for c in into}
    values: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    runners, leaves = [], []
    known = {} if model.whole is None else numbers_of(model, [tensors], buffers)[0]
    examples = Examples({**tensors, **known}, size)

    def noted(section: int, micro_batch: int, found: Sequence[Tensor]) -> None:
        statistics.update(zip((each.name for each in model.sections[section].statistics), found, strict=True))

    for section in model.sections:
        mine = {
            name: initial.parameters[name].detach().requires_grad_(name in model.trainable)
            for name in section.parameters
        }
        leaves.append(mine)
        fixed = [buffers[name] for name in section.buffers] + [model.constants[n] for n in section.constants]
        runner = SectionRunner(section, Tensors(tuple(mine.values()), tuple(fixed)), crossings, 0, note=noted)
        runners.append(runner)
        values.update(zip(section.makes, runner.forward(values, examples, 0, 0), strict=True))
    tapes = [runner.record(values, examples, 0, 0) for runner in runners]
    for tape in tapes:
        for name, again in zip(tape.section.makes, crossing(tape.made), strict=True):
            assert torch.equal(again, values[name]) or again.isnan().any(), f"{name} differs when it is recomputed"
    gradients = {model.sections[-1].makes[0]: torch.ones(())}
    for tape in reversed(tapes):
        backward([tape], gradients)
    grads: dict[str, Tensor] = {}
    for mine in leaves:
        for name, leaf in mine.items():
            if leaf.grad is not None:
                grads[name] = grads[name] + leaf.grad if name in grads else leaf.grad
    found = MicroBatchStatistics(size, {name: value.detach() for name, value in statistics.items()})
    apply_updates((update for section in model.sections for update in section.updates), buffers, [found])
    return float(tapes[-1].made[0].detach()), grads


def everywhere(flow: Flow, costs: Sequence[Cost]) -> list[int]:
    """Cuts after every op where that is possible."""
    return [position for position, live in enumerate(flow.live_bytes()[:-1]) if live is not None]


def differences(
    family: Family, batch_sizes: tuple[int, ...] = (2, 1, 5), choose: CutChooser | None = None
) -> tuple[PartitionedModel, list[str]]:
    """The split model, and where it differs from plain eager."""
    recipe = Recipe(family.build, loss=family.loss)
    source = SampleSource(Samples(family.sample), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors, choose=choose)
    initial = materialise(recipe, 0)
    eager = initial.module.train()
    buffers = {name: value.clone() for name, value in initial.buffers.items()}
    found = []
    for size in batch_sizes:
        tensors = source.micro_batch(range(size)).tensors
        eager.zero_grad()
        loss = LossModule(eager, recipe)({key: value.clone() for key, value in tensors.items()})[0]
        loss.backward()
        expected = float(loss.detach())
        actual, grads = run_in_turn(model, initial, buffers, tensors, size)
        if not abs(actual - expected) <= 1e-6 * abs(expected):
            found.append(f"loss at {size}: {actual} instead of {expected}")
        found += _unequal(f"gradient at {size}", grads, {n: p.grad for n, p in eager.named_parameters()})
        found += _unequal(f"buffer at {size}", buffers, dict(eager.named_buffers()))
    return model, found


def _unequal(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor | None]) -> list[str]:
    return [f"{what}: {name}" for name, value in expected.items() if not _is_equal(actual.get(name), value)]


def _is_equal(actual: Tensor | None, expected: Tensor | None) -> bool:
    """No gradient is one of zeros only where eager has none: an expert that no token chose."""
    if actual is None or expected is None:
        return expected is None and (actual is None or not actual.any())
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-7, equal_nan=False)
