"""The choice of cut-points is arithmetic on two curves."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from varuna.partition.capture.capture import Recipe
from varuna.partition.cut.cuts import MOST_SECTIONS, choose_cuts
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.model import partition

LAYER_COST = [1.0, 3.0, 1.0, 5.0]
LAYER_LIVE = [3.0, 3.0, 1.0, 4.0]


def test_cuts_fall_where_little_is_alive() -> None:
    costs, live = LAYER_COST * 6, LAYER_LIVE * 6
    cuts = choose_cuts(costs, live)
    assert cuts == [2, 6, 10, 14, 18, 22]


def test_a_wished_number_gives_sections_of_about_equal_cost() -> None:
    costs, live = LAYER_COST * 12, LAYER_LIVE * 12
    cuts = choose_cuts(costs, live, 3)
    assert len(cuts) == 3
    assert all(live[cut] == 1.0 for cut in cuts)
    ends = [0, *(cut + 1 for cut in cuts), len(costs)]
    weights = [sum(costs[a:b]) for a, b in pairwise(ends)]
    assert max(weights) <= 1.5 * min(weights)


def test_no_cut_falls_behind_the_wide_logits() -> None:
    costs = [*LAYER_COST * 6, *LAYER_COST[:3], 16.0, 1.5, 1.5]
    live = [*LAYER_LIVE * 6, *LAYER_LIVE[:3], 60.0, 60.0, 0.0]
    assert choose_cuts(costs, live) == [2, 6, 10, 14, 18, 22, 26]


BODY = 3
"""Repeats of LAYER_COST and LAYER_LIVE in front of the ends below; the first, second and last op of each are layers."""
ENDS = {
    "gpt2_of_two_layers": ([0.1, 60.0, 0.0, 3.0], [1.0, 65.0, 65.0, 0.0], [0, 1]),
    "large_vocabulary_in_bf16": ([0.1, 40.0, 20.0, 9.0], [1.0, 60.0, 120.0, 0.0], [1]),
    "nothing_but_a_vocabulary": ([0.1, 500.0, 400.0], [1.0, 5000.0, 0.0], [1]),
    "soft_capped_logits": ([0.1, 90.0, 6.0, 6.0, 6.0, 3.0], [1.0, 250.0, 250.0, 250.0, 250.0, 0.0], [1]),
    "bert_with_its_transform": ([2.0, 0.1, 60.0, 0.0, 12.0], [1.0, 1.0, 240.0, 240.0, 0.0], [0, 2]),
    "bert_with_sentence_pairs": ([0.1, 60.0, 0.0, 14.0, 0.0, 0.1], [1.0, 240.1, 240.0, 0.1, 0.1, 0.0], [1, 2]),
    "segmentation": ([0.1, 3.0, 8.0, 8.0], [1.0, 2.0, 150.0, 0.0], [1]),
}
"""Costs, live bytes and layers of a last layer and its loss."""


def with_body(costs: list[float], live: list[float], layers: list[int]) -> tuple[list[float], list[float], list[int]]:
    start = 4 * BODY
    body = [4 * layer + op for layer in range(BODY) for op in (0, 1, 3)]
    return [*LAYER_COST * BODY, *costs], [*LAYER_LIVE * BODY, *live], [*body, *(start + layer for layer in layers)]


@pytest.mark.parametrize("end", ENDS)
def test_no_cut_falls_between_a_wide_head_and_its_loss(end: str) -> None:
    costs, live, layers = with_body(*ENDS[end])
    cuts = choose_cuts(costs, live, layers=layers)
    assert {2, 6, 10} <= set(cuts), "the body is cut as before, and in front of the head"
    assert max(live[cut] for cut in cuts) <= 2.0


def test_a_wished_number_does_not_part_a_wide_head_from_its_loss() -> None:
    costs, live, layers = with_body(*ENDS["nothing_but_a_vocabulary"])
    for requested in (1, 4, 9):
        cuts = choose_cuts(costs, live, requested, layers=layers)
        assert len(cuts) == requested
        assert max(live[cut] for cut in cuts) <= 4.0


def test_a_wide_head_with_a_loss_in_the_middle_is_not_cut_either() -> None:
    head_cost, head_live = [0.1, 40.0, 0.0, 9.0], [1.0, 61.0, 61.0, 1.0]
    costs, live = (
        [*LAYER_COST * 2, *head_cost, *LAYER_COST * 2, 40.0, 9.0],
        [*LAYER_LIVE * 2, *head_live, *LAYER_LIVE * 2],
    )
    layers = [0, 1, 3, 4, 5, 7, 9, 12, 13, 15, 16, 17, 19, 20]
    cuts = choose_cuts(costs, [*live, 60.0, 0.0], layers=layers)
    assert max([*live, 60.0, 0.0][cut] for cut in cuts) == 1.0
    assert any(8 < cut < 13 for cut in cuts)
    assert cuts[-1] in (18, 19)


def test_what_follows_the_last_layer_is_cut_where_that_is_cheap() -> None:
    """A classifier's scores, and a long computation without parameters."""
    costs, live = [*LAYER_COST * BODY, 5.0, 10.0, 10.0], [*LAYER_LIVE * BODY, 1.0, 1.0, 0.0]
    assert choose_cuts(costs, live, layers=[0, 12])[-1] >= 12


def test_an_image_decoder_that_grows_to_its_end_is_cut_all_along() -> None:
    """Ever fewer channels of ever more pixels: nothing lower follows, but layers do."""
    costs, live = [5.0, 0.2] * 8 + [1.0], [float(2**level) for level in range(8) for _ in range(2)] + [0.1]
    cuts = choose_cuts(costs, live, layers=[*range(0, 16, 2), 16])
    ends = [0, *(cut + 1 for cut in cuts), len(costs)]
    assert max(sum(costs[a:b]) for a, b in pairwise(ends)) <= 0.3 * sum(costs)


class Capped(nn.Module):
    """A wide head as models have it: tied, with a bias of its own, capped, in fp32, and a regulariser in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(2048, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.bias, self.certainty = nn.Parameter(torch.zeros(2048)), nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.norm(x) @ self.embed.weight.T + self.bias
        capped = (30 * torch.tanh(logits / 30)).double()
        loss = nn.functional.cross_entropy(capped.flatten(0, 1), labels.flatten())
        return loss * self.certainty + 1e-3 * self.norm.weight.pow(2).sum()


@pytest.mark.nightly
def test_the_last_layer_of_a_model_is_its_head() -> None:
    seen: list[str] = []

    def choose(flow: Flow, costs: Sequence[Cost]) -> list[int]:
        seen.extend(str(flow.ops[layer].target) for layer in flow.layers())
        return choose_cuts([cost.forward_s for cost in costs], flow.live_bytes(), layers=flow.layers())

    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model = partition(Recipe(Capped), {"input_ids": tokens, "labels": tokens}, choose=choose)
    assert [name.split(".")[1] for name in seen] == ["embedding", "linear", "linear", "layer_norm", "matmul"]
    widths = [c.shape(1) for into in model.split.crossings for c in into]
    assert widths
    assert all(shape == (1, 4, 8) for shape in widths)


def test_forbidden_positions_are_never_cut() -> None:
    live = [None if i % 2 else 1.0 for i in range(20)]
    assert all(cut % 2 == 0 for cut in choose_cuts([1.0] * 20, live))


def test_nothing_can_be_cut_behind_the_last_op_or_in_an_empty_graph() -> None:
    assert choose_cuts([1.0], [0.0]) == []
    assert choose_cuts([], []) == []


@given(
    st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 100))), min_size=1, max_size=120),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_cuts_are_ascending_allowed_and_few_enough(
    curve: list[tuple[float, float | None]], requested: int | None
) -> None:
    costs, live = [cost for cost, _ in curve], [size for _, size in curve]
    cuts = choose_cuts(costs, live, requested)
    assert cuts == sorted(set(cuts))
    assert all(live[cut] is not None and cut < len(costs) - 1 for cut in cuts)
    assert len(cuts) <= (requested if requested is not None else MOST_SECTIONS - 1)
