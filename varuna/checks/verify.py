"""Does the split model compute what the whole one does? Sections in turn, in one process, against plain eager.

Both run in training mode, dropout and all: every operation that draws random numbers draws the same ones in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varuna.data.keys import derive_key
from varuna.data.randomness import generator_lock
from varuna.engine.section import Examples, SectionRunner, Tape, Tensors, backward, crossing
from varuna.partition.capture import LossModule, Recipe
from varuna.partition.initialise import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel


@dataclass(frozen=True)
class Verification:
    """Largest relative differences between split and unsplit."""

    loss_error: float
    gradient_error: float
    parameter: str
    """where the gradient differs most"""


def verify(model: PartitionedModel, recipe: Recipe, initial: Initial, batch: Mapping[str, Tensor]) -> Verification:
    """Run one batch through both.

    A gradient's error is the largest difference of its elements, relative to the largest element of the whole one; no
    gradient (an expert without tokens) is one of zeros.
    """
    model = model.graphs[variant_of(model, batch, ())]
    whole = initial.module.train()
    whole.zero_grad()
    with generator_lock, torch.random.fork_rng(devices=[]), SameDraws():  # type: ignore[no-untyped-call]
        found, gradients = _run_sections(model, initial, batch)  # first: the whole one updates its buffers
        loss = LossModule(whole, recipe)({key: value.clone() for key, value in batch.items()})[0]
        loss.backward()
    expected = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    errors = {name: _relative(gradients.get(name), expected.get(name)) for name in {**expected, **gradients}}
    worst = max(errors, key=errors.__getitem__, default="")
    reference = float(loss.detach())
    return Verification(abs(found - reference) / max(abs(reference), 1e-12), errors.get(worst, 0.0), worst)


def _relative(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        odd = expected if found is None else found
        return 0.0 if odd is None or not odd.any() else float("inf")
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / scale if scale else float(found.abs().max())


def _run_sections(
    model: PartitionedModel, initial: Initial, batch: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients summed over the sections that use a parameter."""
    crossings = {each.name: each for into in model.split.crossings for each in into}
    examples = Examples(batch, len(next(iter(batch.values()))))
    values: dict[str, Tensor] = {}
    tapes: list[Tape] = []
    leaves: list[dict[str, Tensor]] = []
    for section in model.sections:
        mine = {
            name: initial.parameters[name].detach().requires_grad_(name in model.trainable)
            for name in section.parameters
        }
        fixed = [initial.buffers[name] for name in section.buffers] + [model.constants[n] for n in section.constants]
        tensors = Tensors(tuple(mine[name] for name in section.parameters), tuple(fixed))
        tape = SectionRunner(section, tensors, crossings, 0).record(values, examples, 0, 0)
        values.update(zip(section.makes, crossing(tape.made), strict=True))
        tapes.append(tape)
        leaves.append(mine)
    gradients = {model.sections[-1].makes[0]: torch.ones(())}
    for tape in reversed(tapes):
        backward(tape, gradients)
    sums: dict[str, Tensor] = {}
    for mine in leaves:
        for name, leaf in mine.items():
            if leaf.grad is not None:
                sums[name] = sums[name] + leaf.grad if name in sums else leaf.grad
    return float(tapes[-1].made[0].detach()), sums


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every random operation draws by its name and shapes, whenever it runs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One op."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            shapes = [
                tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in tree_leaves((args, kwargs))
            ]
            torch.default_generator.manual_seed(derive_key(0, str(func), repr(shapes)))
        return func(*args, **(kwargs or {}))
