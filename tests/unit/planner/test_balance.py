from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from varuna.planner.balance import balance


def bottleneck(costs: list[float], last_costs: list[float], starts: tuple[int, ...]) -> float:
    spans = [slice(start, end) for start, end in pairwise((*starts, len(costs)))]
    return max(*(sum(costs[span]) for span in spans[:-1]), sum(last_costs[spans[-1]]), 0.0)


@given(costs=st.lists(st.floats(0, 10), min_size=1, max_size=9), share=st.floats(0, 1), data=st.data())
@settings(max_examples=by_depth(25, 150), deadline=None)
def test_no_other_partition_has_a_smaller_bottleneck(costs: list[float], share: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    last_costs = [share * cost for cost in costs]
    starts = balance(costs, last_costs, stages)
    assert len(starts) == stages
    assert starts[0] == 0
    best = min(bottleneck(costs, last_costs, (0, *cuts)) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert bottleneck(costs, last_costs, starts) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_last_stage_gets_more_where_it_does_not_recompute() -> None:
    assert balance([4.0] * 7, [3.0] * 7, 2) == (0, 3)


def test_ties_leave_the_early_stages_less_to_hold() -> None:
    assert balance([1.0] * 5, [1.0] * 5, 2) == (0, 2)


def test_sections_without_cost_still_spread_out() -> None:
    assert balance([0.0] * 6, [0.0] * 6, 3) == (0, 2, 4)


def test_every_depth_of_256_sections_has_that_many_stages() -> None:
    chance = Random(0)
    costs = [chance.random() for _ in range(256)]
    assert [len(balance(costs, costs, stages)) for stages in range(1, 257)] == list(range(1, 257))
