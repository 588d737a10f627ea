"""The memory that a section needs at work is found on fake tensors, and is what it uses."""

from functools import partial

import torch
from torch import Tensor, nn

from varuna.partition.capture.capture import Recipe
from varuna.partition.graph.flow import Flow
from varuna.partition.model import partition

WIDTH = 37  # no other test's: what sections of one kind need is found once in a process


class Two(nn.Module):
    """A linear and a dropout, which draws, then a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(torch.relu(self.first(x))))
        return out.pow(2).mean()


def test_bytes_are_those_of_what_autograd_keeps_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    facts = partition(Recipe(Two), {"x": torch.zeros(2, WIDTH)}, cut_points=0).facts
    assert torch.equal(torch.get_rng_state(), before)
    (section,) = facts.sections
    row = 4 * WIDTH
    # relu's result, dropout's mask of floats or bytes and result, the second linear's result; and the loss
    assert 3 * row + WIDTH <= section.activation_bytes <= 5 * row
    assert section.input_bytes == row
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert 0 < section.fixed_bytes <= 2 * weights  # gradients of parameters on their way to their sums
    assert row <= section.forward_bytes <= section.activation_bytes + row
    # both linears took a row and made one of the same width: their inputs and the gradients of results wait for W
    assert section.queued_bytes == 4 * row
    assert section.split_bytes is not None
    assert section.split_bytes < section.backward_bytes + section.fixed_bytes  # no gradient of a weight is made in I


class Beside(nn.Module):
    """Three linears; what the first one makes either passes by the second one or not."""

    def __init__(self, *, passes: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.passes = passes

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        other = self.second(made)
        out: Tensor = self.third(other + made if self.passes else other + other)
        return out.pow(2).mean()


def test_gradients_of_what_passes_by_a_section_count_with_it() -> None:
    def after_linears(flow: Flow, costs: object) -> list[int]:
        return [position for position, node in enumerate(flow.ops) if "linear" in str(node.target)][:2]

    by, alone = (
        partition(Recipe(partial(Beside, passes=passes)), {"x": torch.zeros(2, WIDTH)}, choose=after_linears).facts
        for passes in (True, False)
    )
    row = 4 * WIDTH
    boundaries = [[section.boundary_bytes for section in facts.sections] for facts in (by, alone)]
    assert boundaries == [[row, 2 * row, 0], [row, row, 0]]
    assert by.sections[1].backward_bytes == alone.sections[1].backward_bytes + row
    assert by.sections[1].split_bytes == (alone.sections[1].split_bytes or 0) + row
