from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.schedule.policy import POLICIES, stash_limit
from varuna.schedule.validate import validate
from varuna.simulator.bounds import lower_bound_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, uniform
from varuna.simulator.step import StepTrace, simulate

seconds = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineCosts:
    stages = draw(st.integers(1, 5))
    one_stage = st.builds(StageCosts, forward_s=seconds, recompute_s=seconds, backward_s=seconds, allreduce_s=seconds)
    one_link = st.builds(LinkCosts, latency_s=seconds, activation_s=seconds, gradient_s=seconds)
    return PipelineCosts(
        stages=tuple(draw(st.lists(one_stage, min_size=stages, max_size=stages))),
        links=tuple(draw(st.lists(one_link, min_size=stages - 1, max_size=stages - 1))),
        optimizer_s=draw(seconds),
    )


def default_limits(stages: int, micro_batches: int, policy: str) -> list[int]:
    return [stash_limit(stages, k, micro_batches, policy) for k in range(stages)]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "units"), [(4, 5, 27), (18, 50, 249), (36, 113, 555), (49, 300, 1341)]
)
def test_the_papers_order_is_as_long_as_the_originals(stages: int, micro_batches: int, units: int) -> None:
    assert simulate(uniform(stages), micro_batches=micro_batches, policy="varuna-strict").step_s == units


@pytest.mark.parametrize(
    ("stages", "micro_batches", "units"), [(4, 5, 27), (18, 50, 249), (36, 113, 555), (49, 300, 1341)]
)
def test_opportunism_never_lengthens_the_papers_order(stages: int, micro_batches: int, units: int) -> None:
    assert simulate(uniform(stages), micro_batches=micro_batches).step_s <= units


def test_gpipe_takes_one_unit_more_in_the_papers_figure() -> None:
    assert simulate(uniform(4), micro_batches=5, policy="gpipe").step_s == 28


def test_a_single_stage_never_recomputes_nor_idles() -> None:
    trace = simulate(uniform(1), micro_batches=7)
    assert (trace.step_s, trace.bubble_fraction) == (21, 0)


@given(
    costs=pipelines(),
    micro_batches=st.integers(1, 10),
    policy=st.sampled_from(POLICIES),
    jitter_s=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_executed_orders_are_valid_and_never_faster_than_the_bound(
    costs: PipelineCosts, micro_batches: int, policy: str, jitter_s: float, seed: int
) -> None:
    limits = default_limits(len(costs.stages), micro_batches, policy)
    trace = simulate(costs, micro_batches=micro_batches, policy=policy, jitter_s=jitter_s, seed=seed)
    order = range(micro_batches)
    validate(
        trace.orders,
        micro_batches=micro_batches,
        backward_order=order[::-1] if policy == "gpipe" else order,
        stash_limits=limits,
    )
    check_times(trace)
    bound_s = lower_bound_s(costs, micro_batches=micro_batches, stash_limits=limits)
    assert trace.step_s >= bound_s * (1 - 1e-12)


@given(costs=pipelines(), micro_batches=st.integers(1, 10), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_stash_limits_are_kept_and_bounded(costs: PipelineCosts, micro_batches: int, data: st.DataObject) -> None:
    count = len(costs.stages)
    limits = data.draw(st.lists(st.integers(1, micro_batches), min_size=count, max_size=count))
    trace = simulate(costs, micro_batches=micro_batches, stash_limits=limits)
    validate(trace.orders, micro_batches=micro_batches, stash_limits=limits)
    bound_s = lower_bound_s(costs, micro_batches=micro_batches, stash_limits=limits)
    assert trace.step_s >= bound_s * (1 - 1e-12)


def check_times(trace: StepTrace) -> None:
    for row in trace.timeline:
        assert all(before.end_s <= after.start_s for before, after in pairwise(row))
    assert 0 <= trace.bubble_fraction < 1
    assert all(usage.live == 1 for usage in trace.usage)


def test_serialisation_queues_messages_while_latency_does_not() -> None:
    two = StageCosts(forward_s=1, recompute_s=1, backward_s=2)
    free = StageCosts(forward_s=0, recompute_s=0, backward_s=0)

    def arrivals(link: LinkCosts) -> list[float]:
        costs = PipelineCosts(stages=(two, free), links=(link,))
        trace = simulate(costs, micro_batches=3, policy="gpipe")
        return [entry.start_s for entry in trace.timeline[1][:3]]

    assert arrivals(LinkCosts(latency_s=5)) == [6, 7, 8]
    assert arrivals(LinkCosts(activation_s=5)) == [6, 11, 16]


def test_each_all_reduce_starts_at_its_own_stages_end() -> None:
    early = uniform(2).stages[0]
    late = StageCosts(forward_s=1, recompute_s=1, backward_s=2, allreduce_s=2)
    hidden = PipelineCosts(stages=(early, late), links=(LinkCosts(),), optimizer_s=0.5)
    assert simulate(hidden, micro_batches=4).step_s == simulate(uniform(2), micro_batches=4).step_s + 0.5


def test_jitter_is_seeded_and_only_slows() -> None:
    costs = uniform(4, link=LinkCosts(latency_s=0.1))
    calm = simulate(costs, micro_batches=20).step_s
    first, again, other = (simulate(costs, micro_batches=20, jitter_s=0.5, seed=s).step_s for s in (1, 1, 2))
    assert first == again != other
    assert min(first, other) > calm


def test_opportunism_absorbs_jitter_better_than_the_strict_order() -> None:
    costs = uniform(18, link=LinkCosts(latency_s=0.1, activation_s=0.4, gradient_s=0.4))
    strict, free = (
        simulate(costs, micro_batches=100, policy=name, jitter_s=0.5).step_s for name in ("varuna-strict", "varuna")
    )
    assert strict > 1.1 * free


def test_the_papers_largest_step_is_near_its_bound() -> None:
    assert simulate(uniform(36), micro_batches=682).step_s <= 1.01 * (4 * 682 + 3 * 34)


def test_links_and_stages_must_match() -> None:
    with pytest.raises(ValueError, match="2 stages have one link less, not 0 links"):
        PipelineCosts(stages=uniform(2).stages, links=())
