"""Random models: a short program over pools of float, integer, boolean and half-wide values.

Every step takes values that any earlier step made, so skips of any length, values of any dtype, views, ties and
in-place writes come to lie across any cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

SIDE = 6
"""Rows and columns of every float value (batch, SIDE, SIDE): a transposed one has the same shape."""
WEIGHTS = 3


@dataclass
class Values:
    """The values that the program has made so far; a step picks by number, modulo what there is."""

    layers: list[nn.Linear]
    floats: list[Tensor]
    integers: list[Tensor]
    booleans: list[Tensor]
    halves: list[Tensor] = field(default_factory=list)
    """chunks: (batch, SIDE, SIDE / 2)"""

    def float(self, number: int) -> Tensor:
        return self.floats[-1 - number % len(self.floats)]


@dataclass(frozen=True)
class Instruction:
    """One step: an operation and the numbers of its operands."""

    name: str
    first: int
    second: int
    layer: int


def _linear(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return torch.tanh(layer(x)) + y


def _relu_in_place(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return torch.relu_(layer(x)) * 0.5 + y


def _transpose(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return x.transpose(1, 2)


def _expand(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return x.mean(1, keepdim=True).expand_as(y)


def _gate(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return x * torch.sigmoid(y)


def _compare(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    v.booleans.append(x > y)
    return x - 0.5 * y


def _where(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return torch.where(v.booleans[-1], x, y)


def _masked_fill_in_place(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return (x + 1).masked_fill_(v.booleans[0], 0.25)


def _sort(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    values, order = x.sort(-1)
    v.integers.append(order)
    return values + y


def _gather(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return x.gather(2, v.integers[-1]) + y


def _embed(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return nn.functional.embedding(v.integers[0][:, :, 0] % SIDE, layer.weight) + x


def _chunk(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    left, right = x.chunk(2, -1)
    v.halves += [left, right]
    return y


def _split_with_sizes(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    one, two, _ = torch.split_with_sizes(x, [3, 2, 1], 1)
    return torch.cat([two, one, y[:, :1]], 1)


def _join(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return torch.cat([v.halves[0], v.halves[-1]], -1) if v.halves else x


def _add_in_place(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return x.clone().add_(y, alpha=0.5)


def _write_view(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    written = x.clone()
    written[:, 1].add_(y[:, 0])
    written[:, :, 2:4] = y[:, :, :2]
    return written


def _write_then_read_twice(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    written = x * 1.0
    view = written[:, ::2]
    v.floats.append(written)
    written.mul_(0.5)
    return torch.cat([view, view], 1) + y


def _fill(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    filled = torch.zeros_like(y, requires_grad=False)
    filled[:, 1:] = y[:, :-1]
    v.floats.append(filled)
    return x * 0.5


def _double(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return (x.double() * 1.5).sin().float() + y


def _half(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    """Rounded on the way forward only, so that the order of sums does not show in gradients."""
    return x + (x.detach().bfloat16() * 2).float() + y


def _scalar(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return x * y.mean().tanh()


def _flatten(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    made: Tensor = layer(x.flatten(0, 1)).view(-1, SIDE, SIDE) + y
    return made


def _no_grad(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    with torch.no_grad():
        scale = layer(x).exp().clamp(max=2)
    made: Tensor = y * scale
    return made


def _bare(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    made: Tensor = x @ layer.weight.t() * 0.3 + layer.bias
    return made


def _grown(v: Values, x: Tensor, y: Tensor, layer: nn.Linear) -> Tensor:
    return torch.cat([x, x.new_ones(x.shape[0], 1, SIDE)], 1)[:, 1:] + torch.arange(SIDE, device=x.device) * 0.1


OPERATIONS: dict[str, Callable[[Values, Tensor, Tensor, nn.Linear], Tensor]] = {
    operation.__name__.removeprefix("_"): operation
    for operation in (
        _linear,
        _relu_in_place,
        _transpose,
        _expand,
        _gate,
        _compare,
        _where,
        _masked_fill_in_place,
        _sort,
        _gather,
        _embed,
        _chunk,
        _split_with_sizes,
        _join,
        _add_in_place,
        _write_view,
        _write_then_read_twice,
        _fill,
        _double,
        _half,
        _scalar,
        _flatten,
        _no_grad,
        _bare,
        _grown,
    )
}


class RandomModel(nn.Module):
    """Runs a program; its last layer shares the weight of its first."""

    def __init__(self, program: tuple[Instruction, ...], *, tied: bool) -> None:
        super().__init__()
        self.program = program
        self.enter, self.leave = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(WEIGHTS))
        if tied:
            self.leave.weight = self.enter.weight

    def forward(self, x: Tensor, numbers: Tensor, y: Tensor) -> Tensor:
        """Mean squared distance of the mixed values from ``y``."""
        first = self.enter(x)
        layers = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        order = torch.argsort(first, dim=-1)
        values = Values(layers, [first], [numbers, order], [first > 0])
        for step in self.program:
            operation = OPERATIONS[step.name]
            made = operation(values, values.float(step.first), values.float(step.second), layers[step.layer])
            values.floats.append(torch.tanh(made) if made.is_contiguous() else made)
        mixed = self.leave(values.floats[-1]) + values.floats[len(values.floats) // 2]
        return nn.functional.mse_loss(mixed, y)


class Points:
    """Random samples."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(SIDE, SIDE, generator=generator),
            "numbers": torch.randint(0, SIDE, (SIDE, SIDE), generator=generator),
            "y": torch.randn(SIDE, SIDE, generator=generator),
        }
