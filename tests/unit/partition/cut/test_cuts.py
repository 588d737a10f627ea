"""The choice of cut-points is arithmetic on two curves."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from varuna.partition.cut.cuts import MOST_SECTIONS, choose_cuts

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
