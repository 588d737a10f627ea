"""Each parameter keeps the dtype that the model gives it: adapters over a frozen base in bf16, for one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import Setup, Tokens, adamw, single_threaded, worst
from varuna.data import sample_index
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


class Adapter(nn.Module):
    """What adapters of low rank do: the frozen layer as it is, and beside it two small ones in a dtype of their own."""

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


def plainly(setup: Setup, steps: int) -> list[tuple[float, float]]:
    """Micro-batch by micro-batch in plain PyTorch, gradients summed in fp32: the rounding of bf16 is the same."""
    torch.manual_seed(setup.seed)
    model = setup.build().train()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer, size = adamw(list(trained.items())), setup.micro_batch
    curve = []
    for step in range(steps):
        sums = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in trained.items()}
        losses, count = 0.0, 0.0
        for first in range(step * setup.global_batch, (step + 1) * setup.global_batch, size):
            places = [sample_index(p, size=50, seed=setup.seed) for p in range(first, first + size)]
            samples = [setup.dataset[place] for place in places]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            weight = (batch["labels"] != -100).sum().float()
            loss = model(**batch) * weight
            for name, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
                sums[name] += gradient.float()
            losses, count = losses + float(loss.detach()), count + float(weight)
        for name, value in trained.items():
            value.grad = (sums[name] / count).to(value.dtype)
        norm = torch.stack([(total / count).norm() for total in sums.values()]).norm()
        optimizer.step()
        curve.append((losses / count, float(norm)))
    return curve


@pytest.mark.parametrize("build", [Adapted, in_bf16])
def test_adapters_over_a_frozen_base_in_bf16_train_as_in_plain_pytorch(build: Any) -> None:
    setup = Setup(build=build, dataset=Tokens(padded=True), clip=None)
    one = setup.losses(1, 1, 3)
    trained = setup.parameters()
    assert trained["embed.weight"].dtype is torch.bfloat16
    assert trained["layers.0.down.weight"].dtype is (torch.float32 if build is Adapted else torch.bfloat16)
    assert worst(one, plainly(setup, 3)) < (1e-5 if build is Adapted else 2e-3)
    assert setup.losses(3, 1, 3) == one
    assert worst(setup.losses(2, 2, 3), one) < (1e-6 if build is Adapted else 2e-3)


def test_memory_is_that_of_the_dtypes_at_hand() -> None:
    setup, half = Setup(build=Adapted), Setup(build=in_bf16)
    frozen = 2 * (64 * 8 + 3 * (8 * 8 + 8) + 3 * 16)  # the normalisation is used in three sections
    adapters = 3 * 2 * 2 * 8
    sections = setup.model.facts.sections
    assert sum(each.trainable_bytes for each in sections) == 4 * adapters
    assert sum(each.trainable_bytes for each in half.model.facts.sections) == 2 * adapters
    assert sum(each.parameter_bytes for each in sections) >= frozen + 4 * adapters
    assert sum(each.parameter_bytes for each in sections) < 2 * frozen + 4 * adapters


def test_such_a_model_is_checked_and_goes_on_from_its_checkpoint(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(steps: int, place: str) -> list[float]:
        trainer = Trainer(Adapted, Tokens(padded=True), adamw, 8, micro_batch=2, device="cpu", checkpoints=place)
        return [step.loss for step in trainer.steps(steps)]

    undisturbed = losses(3, str(tmp_path / "one"))
    assert "checked against plain PyTorch" in capsys.readouterr().err
    assert losses(1, str(tmp_path / "two")) + losses(3, str(tmp_path / "two")) == undisturbed
