"""A model is built without data, whatever its constructor fills its tensors with."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.core.errors import ModelError
from varuna.partition.capture.building import build_without_data
from varuna.partition.capture.capture import Recipe, capture
from varuna.partition.capture.construction import construct


class Refilled(nn.Module):
    """A parameter that is known until it is drawn, within limits: torch looks at the numbers and draws some again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(500))
        nn.init.trunc_normal_(self.weight, std=0.5, a=-0.6, b=0.6)


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.sign = 1 if self.weight.sum() > 0 else -1

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean() * self.sign


def test_a_known_parameter_may_be_drawn_within_limits() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    assert isinstance(build_without_data(Refilled, mode).module.weight, FakeTensor)
    drawn = construct(Refilled, seed=0).parameter("weight", 0)
    assert 0.5 < float(drawn.abs().max()) <= 0.6


def test_a_decision_of_the_constructor_is_told_as_one() -> None:
    with pytest.raises(ModelError, match=r"test_building.py:\d+: the constructor decides there by") as refused:
        capture(Recipe(Undecided), {"x": torch.zeros(2, 3)})
    assert "or do it in forward()" in str(refused.value)
