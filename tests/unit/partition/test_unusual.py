"""Unusual acts of models: routing by data, own backwards, written buffers and inputs, odd outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.partition.families import Family, tokens
from tests.unit.partition.in_turn import differences
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition


class Stack(nn.Module):
    """Embedding, three layers of ``middle``, a head, and a loss in a dict."""

    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(middle() for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), "odd": ("a", 1)}


class Experts(nn.Module):
    """Tokens go to the experts that were chosen for them; an expert without tokens is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 16)
        weight, choice = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(choice == index)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weight[token, place].unsqueeze(-1))
        return out.view_as(x)


class Straight(torch.autograd.Function):
    """Rounds forward; passes twice the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, how: str) -> tuple[Tensor, str]:
        ctx.scale = scale
        return (x * 4).round() / 4, how

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
        return ctx.scale * gradient, None, None


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor
        rounded, how = Straight.apply(self.layer(x), 2.0, "nearest")  # type: ignore[no-untyped-call]
        assert how == "nearest"
        return rounded


class Average(nn.Module):
    """Keeps a moving average of its inputs, as codebooks do, and counts."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(out.mean((0, 1)), alpha=0.1)
            self.seen += 1
        return torch.relu(out)


class Cleaning(nn.Module):
    """Writes to the labels that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(lambda: nn.Linear(16, 16))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        labels[labels == 5] = -100
        loss = self.stack(input_ids, labels)["loss"]
        return input_ids.float(), loss


class Depth(nn.Module):
    """Rates from a tensor, a table as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.rate: float = [rate.item() for rate in torch.linspace(0, 0.5, 3)][1]
        self.table = torch.outer(torch.arange(16.0), torch.ones(16))
        nn.init.trunc_normal_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (1 - self.rate) + self.table


class Filling(nn.Module):
    """Fills memory that was empty part by part, and uses it much later, as RF-DETR does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.after = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.empty((x.shape[0], len(self.heads), 16), dtype=x.dtype, device=x.device)
        for place, head in enumerate(self.heads):
            filled[:, place] = head(x).mean(1)
        for layer in self.after:
            x = x + torch.tanh(layer(x))
        return x + filled.sum(1, keepdim=True)


class Sizes(nn.Module):
    """Reads sizes of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).flatten(0, 1)
        z = torch.relu(self.layer(y))
        reshaped: Tensor = z.view(y.shape[0] // 16, 16, 16)
        return reshaped + torch.zeros(y.shape[0], 16).view(-1, 16, 16) + x.new_ones(x.shape)


ODD: list[Callable[[], nn.Module]] = [Rounded, Sizes, Experts, Average, Depth, Filling]


@pytest.mark.parametrize("middle", by_depth(ODD[:1], ODD))
def test_sections_in_turn_equal_eager(middle: Callable[[], nn.Module]) -> None:
    model, found = differences(Family(lambda: Stack(middle)))
    assert found == []
    assert len(model.sections) >= 3


def test_inputs_that_forward_writes_are_left_alone() -> None:
    model, found = differences(Family(Cleaning))
    assert found == []
    assert len(model.sections) >= 3


def test_updates_belong_to_the_section_that_makes_their_statistics() -> None:
    model, _ = differences(Family(lambda: Stack(Average)))
    names = [name for section in model.sections for update in section.updates for name in update.buffers]
    assert sorted(names) == sorted(f"layers.{i}.{name}" for i in range(3) for name in ("mean", "seen"))
    assert all(not section.buffers for section in model.sections)


class Reading(Average):
    """Its output depends on what it writes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mean


def test_a_buffer_that_is_written_and_read_is_refused_by_name() -> None:
    batch = SampleSource([tokens(i) for i in range(4)], seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(ModelError, match=r"layers\.\d\.mean"):
        partition(Recipe(lambda: Stack(Reading)), batch)
