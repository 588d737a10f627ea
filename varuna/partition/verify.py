"""Does the split model compute what the whole one does? Sections in turn, in one process, against plain eager."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from varuna.core.errors import ModelError
from varuna.engine.section import Examples, SectionRunner, Tape, Tensors, backward
from varuna.partition.capture import LossModule, Recipe
from varuna.partition.initialise import Initial
from varuna.partition.model import PartitionedModel
from varuna.partition.simplify import op_name
from varuna.partition.split import SectionGraph


@dataclass(frozen=True)
class Verification:
    """Largest relative differences between split and unsplit, dropout off in both."""

    loss_error: float
    gradient_error: float
    parameter: str
    """where the gradient differs most"""


def verify(model: PartitionedModel, recipe: Recipe, initial: Initial, batch: Mapping[str, Tensor]) -> Verification:
    """Run one batch through both.

    A gradient's error is the largest difference of its elements, relative to the largest element of the whole one.

    Raises:
        ModelError: a parameter that the whole model trains gets no gradient from the sections, or the reverse.
    """
    whole = initial.module.eval()  # what is random in training is off
    whole.zero_grad()
    loss = LossModule(whole, recipe)(dict(batch))[0]
    loss.backward()
    found, gradients = _run_sections(model, initial, batch)
    expected = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    if expected.keys() != gradients.keys():
        odd = sorted(expected.keys() ^ gradients.keys())
        raise ModelError(f"split and unsplit model train different parameters: {', '.join(odd[:5])}")
    errors = {name: _relative(gradients[name], value) for name, value in expected.items()}
    worst = max(errors, key=errors.__getitem__, default="")
    reference = float(loss.detach())
    return Verification(abs(found - reference) / max(abs(reference), 1e-12), errors.get(worst, 0.0), worst)


def _relative(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / scale if scale else float(found.abs().max())


def _run_sections(
    model: PartitionedModel, initial: Initial, batch: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients summed over the sections that use a parameter."""
    crossings = {crossing.name: crossing for into in model.split.crossings for crossing in into}
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
        tape = SectionRunner(_quiet(section), tensors, crossings, 0).record(values, examples, 0, 0)
        values.update(zip(section.makes, (made.detach().contiguous() for made in tape.made), strict=True))
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


def _quiet(section: SectionGraph) -> SectionGraph:
    """The section with every dropout at 0."""
    if not section.random:
        return section
    module = GraphModule(section.module, _copy(section.module.graph))
    for node in module.graph.nodes:
        if op_name(node) == "aten::dropout":
            node.args = (node.args[0], 0.0, node.args[2])
        elif op_name(node) == "aten::scaled_dot_product_attention":
            if len(node.args) > 4:
                node.args = (*node.args[:4], 0.0, *node.args[5:])
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "dropout_p"}
    module.recompile()
    return SectionGraph(**{**section.__dict__, "module": module, "random": False})


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    copied = torch.fx.Graph()
    output = copied.graph_copy(graph, {})
    copied.output(output)
    return copied
