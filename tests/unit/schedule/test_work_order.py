"""Micro-batches of unlike work run in an order in which a pipeline waits less, by the simulator's word."""

import random
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.schedule.work_order import by_work
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts
from varuna.simulator.step import simulate

STAGE = StageCosts(forward_s=1, recompute_s=1, backward_s=2, input_s=1.2, weight_s=0.8)


@given(st.lists(st.integers(1, 4), max_size=40), st.integers(1, 12))
def test_each_runs_once_the_shortest_first_and_equal_ones_as_they_came(work: list[int], stages: int) -> None:
    order = by_work(work, stages)
    assert sorted(order) == list(range(len(work)))
    found = [work[position] for position in order]
    filling = stages if stages > 3 else 0
    if stages > 1:
        assert found[:filling] == sorted(work)[:filling]
        assert found[filling:] == sorted(work)[filling:][::-1]
    for part in (order[:filling], order[filling:]):
        assert all(a < b for a, b in pairwise(part) if work[a] == work[b])


def test_with_one_stage_or_one_length_the_order_is_that_of_the_samples() -> None:
    assert by_work([3, 1, 2], 1) == (0, 1, 2)
    assert by_work([2, 2, 2, 2, 2], 4) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "most"), [(2, 16, 0.995), (3, 24, 0.99), (4, 8, 0.96), (4, 16, 0.99), (8, 32, 0.96)]
)
def test_steps_are_shorter(stages: int, micro_batches: int, most: float) -> None:
    """With four declared lengths, of which the longest takes four times as long as the shortest."""

    def step_s(work: list[float]) -> float:
        costs = PipelineCosts(stages=(STAGE,) * stages, links=(LinkCosts(),) * (stages - 1))
        return simulate(
            costs, micro_batches=len(work), policy="adaptive", split_last=min(stages, len(work)), work=work
        ).step_s

    def ratio(seed: int) -> float:
        work = random.Random(seed).choices([0.5, 1.0, 1.5, 2.0], k=micro_batches)
        return step_s([work[position] for position in by_work(work, stages)]) / step_s(work)

    assert mean(map(ratio, range(6))) < most
