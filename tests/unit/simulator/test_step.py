import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.schedule.validator import validate
from varuna.calibration.format import Jitter
from varuna.schedule.actions import Kind
from varuna.schedule.policy import POLICIES, stash_limit
from varuna.simulator.bounds import lower_bounds_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, TiedCosts, travel_times_s, uniform
from varuna.simulator.step import simulate
from varuna.simulator.trace import StepTrace

seconds = st.integers(0, 40).map(lambda tenths: tenths / 10)


jitters = st.sampled_from([Jitter(), Jitter(mean_s=0.3), Jitter(quantiles_s=(0.0, 0.1, 4.0))])


@st.composite
def pipelines(draw: st.DrawFn, keeps: st.SearchStrategy[bool] | None = None) -> PipelineCosts:
    stages = draw(st.integers(1, 5))
    one_stage = st.builds(
        StageCosts,
        forward_s=seconds,
        recompute_s=seconds,
        backward_s=seconds,
        input_s=seconds,
        weight_s=seconds,
        allreduce_s=seconds,
        line_share=st.sampled_from([0.0, 0.5, 1.0]),
        keeps_all=st.just(False) if keeps is None else keeps,
    )
    one_link = st.builds(
        LinkCosts,
        latency_s=seconds,
        early_s=seconds,
        activation_s=seconds,
        gradient_s=seconds,
        jitter=jitters,
        line_share=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    )
    return PipelineCosts(
        stages=tuple(draw(st.lists(one_stage, min_size=stages, max_size=stages))),
        links=tuple(draw(st.lists(one_link, min_size=stages - 1, max_size=stages - 1))),
        optimizer_s=draw(seconds),
    )


def calm(costs: PipelineCosts) -> PipelineCosts:
    return replace(costs, links=tuple(replace(link, jitter=Jitter()) for link in costs.links))


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
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
@settings(max_examples=by_depth(25, 150), deadline=None)
def test_executed_orders_are_valid_and_never_faster_than_the_bound(
    costs: PipelineCosts, micro_batches: int, policy: str, seed: int | None
) -> None:
    limits = default_limits(len(costs.stages), micro_batches, policy)
    trace = simulate(costs, micro_batches=micro_batches, policy=policy, seed=seed)
    order = range(micro_batches)
    validate(
        trace.orders,
        micro_batches=micro_batches,
        backward_order=order[::-1] if policy == "gpipe" else order,
        stash_limits=limits,
    )
    assert all(usage.live == 1 for usage in trace.usage)
    check_times(trace)
    bounded = costs if seed is None else calm(costs)
    [bound_s] = lower_bounds_s(bounded, micro_batches=micro_batches, stash_limits=[limits], policy=policy)
    assert trace.step_s >= bound_s * (1 - 1e-12)


@given(
    costs=pipelines(st.booleans()),
    micro_batches=st.integers(1, 10),
    split_last=st.integers(0, 10),
    empties=st.booleans(),
    data=st.data(),
)
@settings(max_examples=by_depth(25, 250), deadline=None)
def test_adaptive_is_valid_and_bounded_however_it_is_limited_split_and_kept(
    costs: PipelineCosts, micro_batches: int, split_last: int, empties: bool, data: st.DataObject
) -> None:
    count = len(costs.stages)
    limits = data.draw(st.lists(st.integers(1, micro_batches), min_size=count, max_size=count))
    trace = simulate(
        costs,
        micro_batches=micro_batches,
        policy="adaptive",
        stash_limits=limits,
        split_last=split_last,
        empties=empties,
    )
    live = [limit if stage.keeps_all else 1 for limit, stage in zip(limits, costs.stages, strict=True)]
    validate(trace.orders, micro_batches=micro_batches, stash_limits=limits, live_limits=live)
    check_times(trace)
    [bound_s] = lower_bounds_s(
        costs, micro_batches=micro_batches, stash_limits=[limits], policy="adaptive", split_last=split_last
    )
    assert trace.step_s >= bound_s * (1 - 1e-12)


@given(costs=pipelines(), micro_batches=st.integers(1, 10), data=st.data())
@settings(max_examples=by_depth(16, 100), deadline=None)
def test_varuna_keeps_any_stash_limits_and_its_bound(
    costs: PipelineCosts, micro_batches: int, data: st.DataObject
) -> None:
    count = len(costs.stages)
    limits = data.draw(st.lists(st.integers(1, micro_batches), min_size=count, max_size=count))
    trace = simulate(costs, micro_batches=micro_batches, stash_limits=limits)
    validate(trace.orders, micro_batches=micro_batches, stash_limits=limits)
    [bound_s] = lower_bounds_s(costs, micro_batches=micro_batches, stash_limits=[limits], policy="varuna")
    assert trace.step_s >= bound_s * (1 - 1e-12)


def check_times(trace: StepTrace) -> None:
    for row in trace.rows:
        assert all(before.end_s <= after.start_s for before, after in pairwise(row))
    assert 0 <= trace.bubble_fraction <= 1  # 1 if nothing but messages takes any time
    for times in trace.stage_times:
        assert min(times) >= 0
        assert sum(times) == pytest.approx(trace.step_s)


def test_serialisation_queues_messages_while_latency_does_not() -> None:
    two = StageCosts(forward_s=1, recompute_s=1, backward_s=2)
    free = StageCosts(forward_s=0, recompute_s=0, backward_s=0)

    def arrivals(link: LinkCosts) -> list[float]:
        costs = PipelineCosts(stages=(two, free), links=(link,))
        trace = simulate(costs, micro_batches=3, policy="gpipe")
        return [entry.start_s for entry in tuple(trace.rows[1])[:3]]

    assert arrivals(LinkCosts(latency_s=5)) == [6, 7, 8]
    assert arrivals(LinkCosts(activation_s=5)) == [6, 11, 16]


def test_each_all_reduce_starts_at_its_own_stages_end() -> None:
    early = uniform(2).stages[0]
    late = StageCosts(forward_s=1, recompute_s=1, backward_s=2, allreduce_s=2)
    hidden = PipelineCosts(stages=(early, late), links=(LinkCosts(),), optimizer_s=0.5)
    assert simulate(hidden, micro_batches=4).step_s == simulate(uniform(2), micro_batches=4).step_s + 0.5


def network(latency_s: float, serialisation_s: float, jitter_s: float) -> LinkCosts:
    return LinkCosts(
        latency_s=latency_s,
        activation_s=serialisation_s,
        gradient_s=serialisation_s,
        jitter=Jitter(mean_s=jitter_s),
    )


GOOD, MID, BAD = network(0.05, 0.2, 0.05), network(0.05, 0.4, 0.2), network(0.1, 0.4, 0.5)


def test_a_seed_gives_the_same_step_again_and_every_other_seed_another() -> None:
    costs = uniform(4, link=network(0.1, 0.0, 0.5))
    first, again, other = (simulate(costs, micro_batches=20, seed=seed).step_s for seed in (1, 1, 2))
    assert first == again != other
    assert min(first, other) > simulate(calm(costs), micro_batches=20).step_s


def test_without_a_seed_every_message_takes_the_mean() -> None:
    still = uniform(4, link=LinkCosts(latency_s=0.6))
    for jitter in (Jitter(mean_s=0.5), Jitter(quantiles_s=(0.25, 0.5, 0.75))):
        costs = uniform(4, link=LinkCosts(latency_s=0.1, jitter=jitter))
        assert simulate(costs, micro_batches=20).step_s == pytest.approx(simulate(still, micro_batches=20).step_s)


@given(seed=st.integers(0, 1000))
@settings(max_examples=by_depth(3, 10), deadline=None)
def test_measured_jitter_stays_within_its_quantiles(seed: int) -> None:
    link = LinkCosts(latency_s=1.0, jitter=Jitter(quantiles_s=(0.5, 0.6, 3.0)))
    travels_s = travel_times_s(link, 100, random.Random(seed))
    assert 1.5 <= min(travels_s) < 1.6 < max(travels_s) <= 4.0


def test_opportunism_absorbs_jitter_better_than_the_strict_order() -> None:
    costs = uniform(18, link=BAD)
    strict, free = (
        simulate(costs, micro_batches=100, policy=name, seed=0).step_s for name in ("varuna-strict", "varuna")
    )
    assert strict > 1.1 * free


def test_adaptive_takes_24_units_in_the_papers_figure() -> None:
    trace = simulate(uniform(4), micro_batches=5, policy="adaptive", split_last=4)
    assert trace.step_s == 24
    assert [use.live for use in trace.usage] == [1, 1, 1, 1]


def test_a_stage_that_runs_empty_shortens_the_step_by_the_recomputes_that_it_spares() -> None:
    even = uniform(8)
    costs = replace(even, stages=(replace(even.stages[0], input_s=1.2, weight_s=0.8),) * 8)

    def step(*, empties: bool) -> tuple[float, list[int]]:
        trace = simulate(costs, micro_batches=32, policy="adaptive", split_last=32, empties=empties)
        assert [use.live for use in trace.usage] == [1] * 8
        return round(trace.step_s, 3), [sum(a.kind is Kind.RECOMPUTE for a in row) for row in trace.orders]

    assert step(empties=False) == (140.2, [31] * 7 + [0])
    assert step(empties=True) == (138.0, [31] * 6 + [25, 0])


def scaled(stage: StageCosts, factor: float) -> StageCosts:
    return replace(
        stage,
        forward_s=factor * stage.forward_s,
        recompute_s=factor * stage.recompute_s,
        backward_s=factor * stage.backward_s,
        input_s=factor * stage.input_s,
        weight_s=factor * stage.weight_s,
    )


@pytest.mark.parametrize("uneven", [0.0, 0.4])
@pytest.mark.parametrize("link", [LinkCosts(), GOOD, MID, BAD], ids=["none", "good", "mid", "bad"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (4, 16), (8, 40), (18, 40)])
def test_adaptive_is_never_slower_than_the_papers_policy(
    uneven: float, link: LinkCosts, stages: int, micro_batches: int
) -> None:
    chance = random.Random(1)
    even = uniform(stages, link=link)
    factors = [1 + uneven * chance.uniform(-1, 1) for _ in even.stages]
    costs = replace(even, stages=tuple(scaled(even.stages[0], factor) for factor in factors))

    def mean_s(policy: str, split_last: int) -> float:
        seeds = range(4) if link.jitter.mean_s else (None,)
        return fmean(
            simulate(costs, micro_batches=micro_batches, policy=policy, split_last=split_last, seed=seed).step_s
            for seed in seeds
        )

    assert mean_s("adaptive", stages) <= mean_s("varuna", 0) * (1.0 if uneven else 0.985)


def test_a_forward_whose_backward_follows_takes_the_time_to_record_its_graph() -> None:
    stage = StageCosts(forward_s=1.0, recompute_s=1.0, backward_s=2.0, record_s=1.5)
    costs = PipelineCosts(stages=(stage, stage), links=(LinkCosts(),))
    trace = simulate(costs, micro_batches=1)
    assert trace.step_s == 1.5 + 1.5 + 2.0 + 2.0, "the only micro-batch is alone on both stages"
    assert StageCosts(forward_s=1.0, recompute_s=1.0, backward_s=2.0, record_s=0.9).record_s == 1.0, "noise"


def test_a_stage_that_keeps_everything_spares_its_recompute_and_holds_more_sets() -> None:
    one = StageCosts(forward_s=1, recompute_s=1, backward_s=2, input_s=1, weight_s=1, stash_bytes=10, live_bytes=100)
    some = PipelineCosts(stages=(one, one), links=(LinkCosts(),))
    kept = replace(some, stages=(replace(one, keeps_all=True), one))
    recomputed, spared = (simulate(costs, micro_batches=8, policy="adaptive") for costs in (some, kept))
    assert spared.step_s <= recomputed.step_s - 4
    assert recomputed.stage_bytes == (4 * 10 + 100, 10 + 100)
    assert spared.stage_bytes[0] == spared.usage[0].live * 110 > 3 * 110


def test_the_times_of_a_stage_tell_waiting_for_a_message_from_waiting_for_work() -> None:
    two = StageCosts(forward_s=1, recompute_s=1, backward_s=2, allreduce_s=0.5)
    costs = PipelineCosts(stages=(two, two), links=(LinkCosts(latency_s=3, activation_s=1),), optimizer_s=0.25)
    first, second = simulate(costs, micro_batches=1).stage_times
    assert first == (3, 3, 7, 0.5, 0.25)
    assert second == (3, 4, 1 + 5, 0.5, 0.25)


def test_tied_parameters_are_exchanged_when_all_holders_have_reduced() -> None:
    slow = replace(uniform(3).stages[0], allreduce_s=10.0)
    costs = replace(uniform(3), stages=(uniform(3).stages[0], uniform(3).stages[0], slow))
    alone = simulate(costs, micro_batches=4)
    tied = simulate(replace(costs, tied=(TiedCosts(stages=(0, 2), exchange_s=3.0),)), micro_batches=4)
    assert tied.reduced_s[0] == tied.reduced_s[2] == max(alone.reduced_s[0], alone.reduced_s[2]) + 3.0
    assert tied.exposed_reduce_s == tied.reduced_s[2] - max(tied.ends_s)
    assert tied.reduced_s[1] == alone.reduced_s[1]


def test_the_papers_largest_step_is_near_its_bound() -> None:
    assert simulate(uniform(36), micro_batches=682).step_s <= 1.01 * (4 * 682 + 3 * 34)


def test_links_and_stages_must_match() -> None:
    with pytest.raises(ValueError, match="2 stages have one link less, not 0 links"):
        PipelineCosts(stages=uniform(2).stages, links=())


@given(st.integers(1, 5), st.lists(st.integers(1, 30).map(lambda tenths: tenths / 10), min_size=1, max_size=12))
@settings(max_examples=by_depth(10, 60))
def test_each_micro_batch_takes_what_its_work_takes(stages: int, work: list[float]) -> None:
    """The row of an action says its micro-batch."""
    kinds = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
    for policy in POLICIES:
        split = stages if policy == "adaptive" else 0
        found = simulate(uniform(stages), micro_batches=len(work), policy=policy, split_last=split, work=work)
        for row in found.rows:
            for (_, kind, micro_batch), begin_s, end_s in row:
                assert end_s - begin_s == pytest.approx(kinds[kind] * work[micro_batch])


def test_work_that_is_all_the_same_changes_nothing() -> None:
    for policy in POLICIES:
        plain = simulate(uniform(4), micro_batches=9, policy=policy)
        assert simulate(uniform(4), micro_batches=9, policy=policy, work=[1.0] * 9).step_s == plain.step_s


def test_a_schedule_that_takes_what_is_ready_suffers_less_from_uneven_work() -> None:
    """Log-normal, as lengths of texts are; the fixed order waits for the long ones."""
    draw, gains = random.Random(0), []
    for _ in range(8):
        drawn = [draw.lognormvariate(0.0, 0.55) for _ in range(32)]
        work = [each * 32 / sum(drawn) for each in drawn]
        fixed = simulate(uniform(8), micro_batches=32, policy="1f1b", work=work).step_s
        gains.append(simulate(uniform(8), micro_batches=32, policy="adaptive", split_last=8, work=work).step_s / fixed)
    assert fmean(gains) < 0.8
