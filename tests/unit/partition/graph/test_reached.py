"""Parameters that autograd gives no gradient are not trained: no weight decay, no momentum of zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition


class Model(nn.Module):
    def __init__(self, compute: "Callable[[Model, Tensor], Any]") -> None:
        super().__init__()
        self.compute = compute
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.side, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x).pow(2).mean()


def without_gradient(model: Model, x: Tensor) -> Any:
    with torch.no_grad():
        hidden = model.body(x)
    return model.head(hidden)


def detached(model: Model, x: Tensor) -> Any:
    return model.head(model.body(x)) + model.side(x).detach()


def of_its_shape(model: Model, x: Tensor) -> Any:
    return model.head(x) * torch.ones_like(model.side(x))


def chosen(model: Model, x: Tensor) -> Any:
    return F.one_hot(model.side(x).argmax(1), 4) * model.head(x)


def straight_through(model: Model, x: Tensor) -> Any:
    soft = model.side(x)
    return model.head((soft.round() - soft).detach() + soft)


def written_after(model: Model, x: Tensor) -> Any:
    values = model.side(x).detach()
    values.mul_(model.body(x))
    return model.head(values)


def written_in_place(model: Model, x: Tensor) -> Any:
    values = torch.zeros_like(x)
    values[:, :4] = model.body(x)
    return model.head(values)


def of_no_weight(model: Model, x: Tensor) -> Any:
    return model.head(x) + 0 * model.side(x)


@pytest.mark.parametrize(
    "compute",
    [
        *(without_gradient, detached, of_its_shape, chosen, straight_through),
        *(written_after, written_in_place, of_no_weight),
    ],
)
def test_what_gets_no_gradient_in_plain_pytorch_is_not_trained(compute: Callable[[Model, Tensor], Any]) -> None:
    plain = Model(compute)
    plain(torch.randn(3, 4)).backward()
    expected = {name for name, value in plain.named_parameters() if value.grad is not None}
    used = partition(Recipe(lambda: Model(compute)), {"x": torch.randn(2, 4)}, cut_points=0)
    held = {name for section in used.sections for name in section.parameters}
    assert held & used.trainable == expected
