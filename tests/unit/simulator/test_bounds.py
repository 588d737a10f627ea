from dataclasses import replace

import pytest

from varuna.simulator.bounds import bottleneck_s, lower_bounds_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, TiedCosts, uniform
from varuna.simulator.step import simulate

WIDE = [1000] * 4


def test_the_bound_of_uniform_stages_is_that_of_the_literature_less_one_spared_recompute() -> None:
    bounds = lower_bounds_s(uniform(4), micro_batches=50, stash_limits=[WIDE], policy="varuna")
    assert bounds == [4 * 50 + 3 * (4 - 2) - 1]


def test_a_slow_link_bounds_the_step() -> None:
    costs = uniform(2, link=LinkCosts(activation_s=10))
    assert lower_bounds_s(costs, micro_batches=20, stash_limits=[WIDE[:2]], policy="varuna") == [1 + 20 * 10 + 3 + 2]


def test_a_short_stash_on_a_long_link_bounds_the_step() -> None:
    costs = uniform(2, link=LinkCosts(latency_s=100))
    bounds = lower_bounds_s(costs, micro_batches=10, stash_limits=[[2, 2]], policy="varuna")
    assert bounds == [5 * (1 + 100 + 3 + 100 + 2)]


@pytest.mark.parametrize(
    ("link", "limits"),
    [
        (LinkCosts(), [14, 11, 8, 5]),
        (LinkCosts(activation_s=7, gradient_s=1), [14, 11, 8, 5]),
        (LinkCosts(latency_s=30), [2, 2, 2, 2]),
    ],
)
def test_the_bottleneck_is_the_lookahead_of_a_full_pipeline(link: LinkCosts, limits: list[int]) -> None:
    short, long = (simulate(uniform(4, link=link), micro_batches=n, stash_limits=limits).step_s for n in (200, 400))
    assert (long - short) / 200 == pytest.approx(bottleneck_s(uniform(4, link=link), stash_limits=limits), rel=0.02)


def test_what_holders_of_a_tied_parameter_exchange_is_in_the_bound() -> None:
    alone = PipelineCosts(stages=uniform(4).stages, links=uniform(4).links)
    tied = replace(alone, tied=(TiedCosts(stages=(0, 3), exchange_s=5.0),))
    bounds = [
        lower_bounds_s(costs, micro_batches=8, stash_limits=[WIDE], policy="varuna")[0] for costs in (alone, tied)
    ]
    assert bounds[1] == bounds[0] + 5
    assert simulate(tied, micro_batches=8).step_s >= bounds[1]
