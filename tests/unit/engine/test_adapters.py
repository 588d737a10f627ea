"""Each parameter keeps the dtype that the model gives it: adapters over a frozen base in bf16, for one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.engine.models import Tokens, adamw
from tests.unit.engine.ranks import Setup
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")


class Adapter(nn.Module):
    """An adapter of low rank: the frozen layer as it is, and beside it two small ones in a dtype of their own."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x)
        both: Tensor = found + self.up(self.down(x.to(self.down.weight.dtype))) * 2.0
        return both.to(found.dtype)


class Adapted(nn.Module):
    """A language model in bf16 whose layers have adapters; embedding and head are tied and frozen."""

    def __init__(self, adapters: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers: Any = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.requires_grad_(False).bfloat16()
        self.layers = nn.ModuleList(Adapter(layer, adapters) for layer in self.layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.norm(x + torch.tanh(layer(x)))
        logits = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def in_bf16() -> nn.Module:
    return Adapted(torch.bfloat16)


@pytest.mark.nightly
def test_memory_is_that_of_the_dtypes_at_hand() -> None:
    setup, half = Setup(build=Adapted), Setup(build=in_bf16)
    frozen = 2 * (64 * 8 + 3 * (8 * 8 + 8) + 3 * 16)  # the normalisation is used in three sections
    adapters = 3 * 2 * 2 * 8
    sections = setup.model.facts.sections
    assert sum(each.trainable_bytes for each in sections) == 4 * adapters
    assert sum(each.trainable_bytes for each in half.model.facts.sections) == 2 * adapters
    assert sum(each.parameter_bytes for each in sections) >= frozen + 4 * adapters
    assert sum(each.parameter_bytes for each in sections) < 2 * frozen + 4 * adapters


@pytest.mark.nightly
def test_such_a_model_is_checked_and_goes_on_from_its_checkpoint(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = Setup(build=Adapted)
    setup.losses(2, 1, 1)
    assert setup.parameters()["embed.weight"].dtype is torch.bfloat16
    assert setup.parameters()["layers.0.down.weight"].dtype is torch.float32

    def losses(steps: int, place: str) -> list[float]:
        trainer = Trainer(Adapted, Tokens(padded=True), adamw, 8, micro_batch=2, device="cpu", checkpoints=place)
        return [step.loss for step in trainer.steps(steps)]

    undisturbed = losses(by_depth(2, 3), str(tmp_path / "one"))
    assert "checked against plain PyTorch" in capsys.readouterr().err
    assert losses(1, str(tmp_path / "two")) + losses(by_depth(2, 3), str(tmp_path / "two")) == undisturbed
