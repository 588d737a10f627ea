"""Sections run in turn equal the unsplit model: loss and every gradient."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import Tokens, tiny_gpt2, tiny_llama
from tests.unit.engine.ranks import Setup
from varuna.engine.stage.section import Examples, SectionRunner, Tensors
from varuna.engine.stage.tape import backward
from varuna.partition.initial.constructor import Initial, materialise
from varuna.partition.model import PartitionedModel


def run_sections(
    model: PartitionedModel, initial: Initial, tensors: dict[str, Tensor], size: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by running all sections in one process."""
    crossings = {c.name: c for into in model.split.crossings for c in into}
    grads: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    tapes, leaves = [], []
    for section in model.sections:
        mine = {name: initial.parameters[name].detach().requires_grad_() for name in section.parameters}
        leaves.append(mine)
        fixed = [initial.buffers[name] for name in section.buffers] + [model.constants[n] for n in section.constants]
        given = Tensors(tuple(mine[name] for name in section.parameters), tuple(fixed))
        tape = SectionRunner(section, given, crossings, 0).record(values, Examples(tensors, size), 0, 0)
        tapes.append(tape)
        values.update(zip(section.makes, (made.detach() for made in tape.made), strict=True))
    loss = tapes[-1].made[0]
    gradients = {model.sections[-1].makes[0]: torch.ones(())}
    for tape in reversed(tapes):
        backward([tape], gradients)
    for mine in leaves:
        for name, leaf in mine.items():
            if leaf.grad is not None:
                grads[name] = grads[name] + leaf.grad if name in grads else leaf.grad
    return float(loss.detach()), grads


def compare(
    build: Callable[[], nn.Module], dataset: Tokens, batch_sizes: tuple[int, ...] = (1, 2, 5)
) -> PartitionedModel:
    setup = Setup(build=build, dataset=dataset)
    recipe, source, model = setup.recipe, setup.source, setup.model
    initial = materialise(recipe, 0)
    for size in batch_sizes:
        tensors = source.micro_batch(range(size)).tensors
        eager = initial.module.train()
        eager.zero_grad()
        loss = eager(**tensors)
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
        found, grads = run_sections(model, initial, tensors, size)
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)
        for name, parameter in eager.named_parameters():
            if parameter.grad is not None:
                assert torch.allclose(grads[name], parameter.grad, rtol=1e-4, atol=1e-7), name
    return model


@pytest.mark.nightly
def test_rotary_positions_at_any_batch_size() -> None:
    compare(partial(tiny_llama, layers=1), Tokens())


class Skips(nn.Module):
    """Long skips, an integer that crosses, a shared weight, an in-place activation and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers[4].weight = self.layers[1].weight
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        first = x
        choice = (x.sum(-1) > 0).long()
        for layer in self.layers:
            x = torch.relu_(layer(x)) + x
        x = x + first.transpose(0, 1).transpose(0, 1) * choice.unsqueeze(-1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_skips_integers_shared_weights_and_in_place_ops() -> None:
    model = compare(Skips, Tokens())
    assert any(len(into) > 1 for into in model.split.crossings)
    assert [tied.name for tied in model.facts.tied] == ["layers.1.weight"]


@pytest.mark.nightly
def test_masks_from_an_input_are_rebuilt_where_they_are_used() -> None:
    class Masked(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            mask = torch.ones(16, dtype=torch.long)
            mask[16 - index % 5 :] = 0
            return {**super().__getitem__(index), "attention_mask": mask}

    model = compare(partial(tiny_gpt2), Masked())  # a capture of its own: with the mask
    readers = [section.index for section in model.sections if "attention_mask" in section.inputs]
    assert len(readers) >= 2  # in each layer
    assert all(len(into) == 1 for into in model.split.crossings[1:])
