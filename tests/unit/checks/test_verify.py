"""The check behind ``inspect --verify``: exact on sound models in training mode, and not blind."""

import torch
from torch import Tensor, nn

from tests.unit.checks.verified import verify
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition

BATCH = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), "y": torch.ones(6, 8)}


class Noisy(nn.Module):
    """Dropout, batch statistics, and layers that are dropped for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            kept = (torch.rand(x.shape[0], 1) < 0.7) / 0.7
            x = x + kept * nn.functional.dropout(torch.tanh(norm(layer(x))), 0.3)
        return nn.functional.mse_loss(x, y)


def test_random_models_with_batch_statistics_agree_to_the_bit() -> None:
    recipe = Recipe(Noisy)
    model = partition(recipe, BATCH)
    found = verify(model, recipe, materialise(recipe, 0), BATCH)
    assert len(model.sections) > 3
    assert (found.loss_error, found.gradient_error) == (0.0, 0.0)


def test_a_section_that_computes_something_else_shows() -> None:
    recipe = Recipe(Noisy)
    model = partition(recipe, BATCH)
    section = next(section for section in model.sections if "tanh" in section.module.code)
    for node in section.module.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sin.default
    section.module.recompile()
    found = verify(model, recipe, materialise(recipe, 0), BATCH)
    assert found.loss_error > 1e-3
    assert found.gradient_error > 1e-3
