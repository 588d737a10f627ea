"""Parameters that may be away while other sections run: what operations with backwards of their own let go."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import Setup

Scale = Callable[[Tensor, Tensor], Tensor]


def scale_of(name: str, remember: Callable[..., None], remembered: Callable[[Any], Tensor]) -> Scale:
    """An operation with a backward of its own, which remembers its weight in some way."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    operation = torch.library.custom_op(f"varuna_tests::{name}", run, mutates_args=())
    operation.register_fake(lambda x, weight: torch.empty_like(x))
    operation.register_autograd(lambda ctx, gradient: (gradient * remembered(ctx), None), setup_context=remember)
    scale: Scale = operation
    return scale


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.weight = inputs[1].view(-1)


SAVING = scale_of("saving", _save, lambda ctx: ctx.saved_tensors[0])
KEEPING = scale_of("keeping", _keep, lambda ctx: ctx.weight)


class Scaled(nn.Module):
    """Frozen layers, each with a scale of its own, and a head that is trained."""

    scale: Scale

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.layers.requires_grad_(False)
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, 16) for _ in self.layers)
        self.scales.requires_grad_(False)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + type(self).scale(torch.tanh(layer(x)), scale.view(16))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Saving(Scaled):
    scale = staticmethod(SAVING)


class Keeping(Scaled):
    scale = staticmethod(KEEPING)


@pytest.mark.parametrize(("build", "streams"), [(Saving, True), (Keeping, False)])
def test_an_operation_that_saves_its_weight_by_autograds_means_lets_it_go(build: type[Scaled], streams: bool) -> None:
    job = Setup(build=build, stream=True)
    assert ("scales.3" in job.model.streamable) == streams
    assert not {"embed.weight", "head.weight"} & job.model.streamable
    assert [section.frozen_bytes for section in job.model.facts.sections] == [
        sum(4 * torch.Size(job.model.shapes[name]).numel() for name in set(section.parameters) & job.model.streamable)
        for section in job.model.sections
    ]
    assert job.losses(2, 1) == replace(job, stream=False).losses(2, 1)
