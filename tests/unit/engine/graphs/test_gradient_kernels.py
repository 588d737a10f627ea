"""Operations that ask whether a gradient will be wanted: F and R compute the same bits, so plans do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth, nightly
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup

LENGTH, WIDTH, STEPS = 16, 8, by_depth(2, 3)


def attention(block: "Block", x: Tensor) -> Tensor:
    """With a learned mask, as in Swin."""
    heads = x.reshape(-1, LENGTH, 2, WIDTH // 2).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=block.table[None] * 2)
    return mixed.transpose(1, 2).flatten(2)


def product(block: "Block", x: Tensor) -> Tensor:
    """A matrix times a batch."""
    return torch.tanh((block.table[0] * 2) @ x)


def recurrent(block: "Block", x: Tensor) -> Tensor:
    """Over four tokens: a graph has each step."""
    return torch.cat([block.lstm(x[:, :4])[0], x[:, 4:]], 1)


class Block(nn.Module):
    def __init__(self, mix: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(1, LENGTH, LENGTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True) if mix is recurrent else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.linear(self.mix(self, x))
        return made


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(*[Block(mix) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.head(self.blocks(self.embed(input_ids)))
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


@pytest.mark.nightly
@pytest.mark.parametrize("mix", [product, *nightly(attention, recurrent)])
def test_a_plan_changes_no_bit_where_kernels_ask_for_gradients(mix: Callable[[Block, Tensor], Tensor]) -> None:
    setup = Setup(lambda: Mixing(mix))
    flat = setup.losses(1, 1, STEPS)
    assert worst(flat, reference(setup, STEPS)) < 1e-5
    assert setup.losses(3, 1, STEPS) == flat
