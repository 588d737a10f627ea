"""``ctc_loss``: one operation of the graph, weighed as one whole batch has it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.depth import by_depth
from varuna.checks.experiment import Experiment
from varuna.checks.loss_weight import check_weighing
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition
from varuna.partition.opaque.ctc_loss import Alignments


class Heard(nn.Module):
    """Nine frames, up to three letters; their number differs from sample to sample."""

    def __init__(self, reduction: str, flat: bool, zero_infinity: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 6)
        self.reduction, self.flat, self.zero_infinity = reduction, flat, zero_infinity

    def forward(self, sound: Tensor, frames: Tensor, letters: Tensor) -> Tensor:
        odds = self.two(torch.tanh(self.one(sound))).log_softmax(-1).transpose(0, 1)
        said = letters >= 0
        targets = letters.masked_select(said) if self.flat else letters.clamp(min=0)
        how: Any = {"reduction": self.reduction, "zero_infinity": self.zero_infinity}
        return F.ctc_loss(odds, targets, frames, said.sum(-1), **how)


class Sounds:
    """One to three letters."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        letters = torch.randint(1, 6, (3,), generator=draws)
        letters[1 + index % 3 :] = -1
        return {
            "sound": torch.randn(9, 4, generator=draws),
            "frames": torch.tensor(9 - index % 3),
            "letters": letters,
        }


@pytest.mark.parametrize(("reduction", "flat"), by_depth([("mean", True)], [("mean", True), ("sum", False)]))
def test_parts_of_a_batch_give_the_loss_of_the_whole(reduction: str, flat: bool) -> None:
    source, recipe = SampleSource(Sounds(), seed=0), Recipe(lambda: Heard(reduction, flat))
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    assert not model.mixing, "no run is needed to know that examples are kept apart"
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_the_operation_has_the_bits_of_torchs_forward_and_backward(zero_infinity: bool) -> None:
    batch = SampleSource(Sounds(), seed=0).micro_batch([0, 1, 2, 3]).tensors
    batch["frames"][2] = 1  # too few for its letters: infinite
    model = Heard("mean", True, zero_infinity)
    expected = model(**batch)
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    with Alignments():
        found = model(**batch)
    assert torch.equal(found, expected)
    assert found.isfinite() == zero_infinity
    own = torch.autograd.grad(found, [*model.parameters()])
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
