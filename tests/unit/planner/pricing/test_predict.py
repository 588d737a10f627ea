from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planner.models import MB, calibrated, model, section
from varuna.calibration.file import read_calibration
from varuna.calibration.format import Calibrations, Jitter, Link, NetworkCosts, OptimizerCosts, Ring
from varuna.core.devices import equal_workers
from varuna.core.model import JobFacts, ModelFacts, Network, TiedParameter
from varuna.core.plan import Pipeline, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import plan_run
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.predict import predict
from varuna.planner.pricing.profile import Profile, profile
from varuna.planner.sweep import rank_plans
from varuna.schedule.policy import stash_limit
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, TiedCosts, uniform
from varuna.simulator.step import simulate

ROUND = NetworkCosts(link=Link(latency_s=0.25, bytes_per_s=4 * MB), rings=(Ring(latency_s=0.25, bytes_per_s=50 * MB),))


def plan(
    starts: tuple[int, ...],
    sections: int,
    *,
    micro_batches: int = 1,
    replicas: int = 1,
    policy: str = "varuna",
    **rest: Any,
) -> Plan:
    stages = len(starts)
    limits = tuple(stash_limit(stages, k, micro_batches) for k in range(stages))
    return Plan(
        micro_batch=1,
        global_batch=micro_batches * replicas,
        pipelines=(Pipeline(replicas=replicas, bounds=(*starts, sections), **{"stash_limits": limits, **rest}),),
        policy=policy,
    )


def of(facts: ModelFacts, micro_batch: int, **changes: object) -> Profile:
    return profile(calibrated(facts, **{"across_vms": ROUND, "action_s": 1.0, **changes}), micro_batch)


def test_costs_scale_with_the_micro_batch_and_carry_the_cost_of_every_action() -> None:
    costs = pipeline_costs(of(model([section(0.5)] * 4), 2), plan((0, 3), 4), gpus_per_vm=1)
    first, last = costs.stages
    assert (first.forward_s, first.recompute_s, first.backward_s) == (4, 4, 7)
    assert [first.input_s, first.weight_s] == pytest.approx([1 + 0.6 * 6, 1 + 0.4 * 6])
    assert (last.forward_s, last.recompute_s, last.backward_s) == (2, 2, 3)
    assert (first.stash_bytes, first.live_bytes) == (0, 2 * 3 * 50 * MB)
    assert (last.stash_bytes, last.live_bytes) == (4 * MB, 2 * 50 * MB)


def test_actions_that_give_messages_cost_more_and_these_leave_meanwhile() -> None:
    facts = model([section(1.0)] * 3)
    plain, given = (pipeline_costs(of(facts, 1, hand_over_s=s), plan((0, 1, 2), 3), gpus_per_vm=1) for s in (0.0, 0.5))
    more = [
        (b.forward_s - a.forward_s, b.backward_s - a.backward_s, b.input_s - a.input_s)
        for a, b in zip(plain.stages, given.stages, strict=True)
    ]
    assert more == [(0.5, 0.0, 0.0), (0.5, 0.5, 0.5), (0.0, 0.5, 0.5)]
    for a, b in zip(plain.stages, given.stages, strict=True):
        assert (b.recompute_s, b.weight_s) == (a.recompute_s, a.weight_s)
    for known, link in zip(plain.links, given.links, strict=True):
        way_s = known.latency_s + known.gradient_s
        assert link.latency_s - link.early_s == pytest.approx(known.latency_s - min(0.5, way_s))
        assert link.latency_s + link.gradient_s >= 0, "nothing arrives before it was given"
    [alone] = pipeline_costs(of(facts, 1, hand_over_s=0.5), plan((0,), 2), gpus_per_vm=1).stages
    assert alone.backward_s == 3 * 2.0 + 1.0


def test_forwards_that_read_samples_cost_more() -> None:
    facts = model([section(1.0).model_copy(update={"input_bytes": 8}), section(1.0)])
    plain, reading = (pipeline_costs(of(facts, 1, samples_s=s), plan((0, 1), 2), gpus_per_vm=1) for s in (0.0, 0.5))
    first, last = zip(plain.stages, reading.stages, strict=True)
    assert first[1].forward_s - first[0].forward_s == first[1].record_s - first[0].record_s == 0.5
    assert first[1].backward_s == first[0].backward_s
    assert last[0] == last[1], "it reads none"


def test_kept_sections_move_from_the_recompute_to_the_stash() -> None:
    profiled = of(model([section(0.5)] * 4), 2)
    some, all_kept = (pipeline_costs(profiled, plan((0, 3), 4, kept=(kept, 0)), gpus_per_vm=1) for kept in (2, 3))
    assert some.stages[0].recompute_s == 2
    assert (some.stages[0].stash_bytes, some.stages[0].live_bytes) == (2 * 2 * 50 * MB, 2 * 50 * MB)
    assert (some.stages[0].keeps_all, all_kept.stages[0].keeps_all) == (False, True)


def test_costs_of_links_are_those_of_the_cut() -> None:
    costs = pipeline_costs(of(model([section(0.5)] * 4), 2), plan((0, 3), 4), gpus_per_vm=1)
    assert costs.links == (LinkCosts(latency_s=0.25, activation_s=1, gradient_s=1, line_share=1.0),)
    within = pipeline_costs(of(model([section(0.5)] * 4), 2), plan((0, 3), 4), gpus_per_vm=2)
    assert within.links == (LinkCosts(latency_s=0.25, activation_s=1, gradient_s=1),), "it leaves no host"


def test_sums_share_the_line_of_a_host_unless_they_stay_within_it() -> None:
    profiled = of(model([section(0.5)] * 4), 2)
    for replicas, vm_size, shares in ((1, 1, [0, 0]), (2, 1, [1, 1]), (2, 2, [0.5, 0.5]), (2, 4, [0, 0])):
        costs = pipeline_costs(profiled, plan((0, 3), 4, replicas=replicas), gpus_per_vm=vm_size)
        assert [stage.line_share for stage in costs.stages] == shares


def test_links_within_a_vm_use_its_own_network() -> None:
    inner = NetworkCosts(
        link=Link(latency_s=0, bytes_per_s=8 * MB, jitter=Jitter(mean_s=0.5)),
        rings=(Ring(latency_s=0, bytes_per_s=1e15),),
    )
    costs = pipeline_costs(of(model([section()] * 4), 2, within_vm=inner), plan((0, 1, 2), 4), gpus_per_vm=2)
    assert [link.activation_s for link in costs.links] == [0.5, 1]
    assert [(link.latency_s, link.jitter.mean_s) for link in costs.links] == [(0, 0.5), (0.25, 0)]


def test_the_slowest_stage_ends_the_optimizer_step_wherever_its_state_lives() -> None:
    facts = model([section()] * 3)
    on_gpu = of(facts, 1, optimizer=OptimizerCosts(fixed_s=0.5, bytes_per_s=400 * MB))
    assert pipeline_costs(on_gpu, plan((0, 1), 3), gpus_per_vm=1).optimizer_s == pytest.approx(0.5 + 2 + 2 * 0.25)
    on_host = of(facts, 1, optimizer=OptimizerCosts(host_bytes_per_s=100 * MB))
    assert pipeline_costs(on_host, plan((0, 1), 3), gpus_per_vm=1).optimizer_s == pytest.approx(
        2 * 400 / 100 + 2 * 0.25
    )
    assert on_host.optimizer_bytes.over(range(3)) == 0


def test_all_reduces_hide_behind_the_last_backward_of_the_sections_in_front() -> None:
    # A section's backward takes 2 s; 100 MB over two ranks at 50 MB/s take 2 * (0.25 + 1) s.
    profiled = of(model([section(1.0)] * 3), 1)
    [alone] = pipeline_costs(profiled, plan((0,), 3), gpus_per_vm=1).stages
    [shared] = pipeline_costs(profiled, plan((0,), 3, replicas=2), gpus_per_vm=1).stages
    assert alone.allreduce_s == 0
    assert shared.allreduce_s == pytest.approx((2 + 3 * 2.5) - 3 * 2), (
        "the first starts after 2 s, and the link is busy from then on"
    )


def test_a_forward_that_keeps_its_graph_takes_as_long_as_a_recompute() -> None:
    facts = model([section(1.0)] * 2)
    slow = calibrated(facts, across_vms=ROUND)
    kinds = {name: kind.model_copy(update={"recompute_s": (3.0,)}) for name, kind in slow.kinds.items()}
    [stage] = pipeline_costs(profile(slow.model_copy(update={"kinds": kinds}), 1), plan((0,), 2), gpus_per_vm=1).stages
    assert stage.record_s - stage.forward_s == pytest.approx(2 * (3.0 - 1.0))


def test_stages_that_share_a_parameter_pay_for_sending_its_gradient() -> None:
    tied = (TiedParameter(name="wte", sections=(0, 3), size_bytes=50 * MB),)
    facts = of(model([section()] * 4, tied), 1)
    apart = pipeline_costs(facts, plan((0, 1, 3), 4), gpus_per_vm=1)
    together = pipeline_costs(facts, plan((0,), 4), gpus_per_vm=1)
    assert apart.tied == (TiedCosts(stages=(0, 2), exchange_s=0.25 + 50 / 4),)
    assert together.tied == ()


@pytest.mark.parametrize("link", [LinkCosts(), LinkCosts(latency_s=0.1, activation_s=0.4, gradient_s=0.4)])
@pytest.mark.parametrize("stages", [4, 24])
@pytest.mark.parametrize("policy", ["varuna", "adaptive"])
def test_long_steps_are_extrapolated_within_two_percent(policy: str, link: LinkCosts, stages: int) -> None:
    slow = StageCosts(forward_s=1.1, recompute_s=1.1, backward_s=2.2)
    even = uniform(stages, link=link)
    costs = PipelineCosts(stages=(*even.stages[:2], slow, *even.stages[3:]), links=even.links)
    chosen = plan(tuple(range(stages)), stages, micro_batches=8000 // stages, policy=policy)
    split = chosen.with_each_pipeline(split_last=stages if policy == "adaptive" else 0)
    full = simulate(
        costs,
        micro_batches=8000 // stages,
        policy=policy,
        stash_limits=split.first.stash_limits,
        split_last=split.first.split_last,
    )
    assert predict(costs, split).step_s == pytest.approx(full.step_s, rel=0.02)


def test_waves_of_micro_batches_do_not_hide_the_lookahead_of_a_deep_pipeline() -> None:
    calibration = read_calibration(Path("examples/calibrations/gpt2-8.3b-v100.json"))
    request = PlanRequest(
        calibrations=calibration, workers=equal_workers(25 * 163), global_batch=65536, stages=25, micro_batch=1
    )
    chosen = rank_plans(request).plans[0]
    full = simulate(
        pipeline_costs(profile(request.calibration, 1), chosen, gpus_per_vm=request.vm_size),
        micro_batches=len(chosen.micro_batches_of(0)),
        policy=chosen.policy,
        stash_limits=chosen.first.stash_limits,
        split_last=chosen.first.split_last,
        empties=chosen.first.empties,
    )
    assert chosen.step_s == pytest.approx(full.step_s, rel=0.01)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    link = LinkCosts(latency_s=0.5, activation_s=0.4, gradient_s=0.4)
    even = uniform(4, link=link)
    stage = replace(even.stages[0], allreduce_s=7.0)
    costs = PipelineCosts(stages=(stage, *even.stages[1:]), links=even.links, optimizer_s=3.0)
    for micro_batches in (6, 2000):
        prediction = predict(costs, plan((0, 1, 2, 3), 4, micro_batches=micro_batches))
        parts = prediction.breakdown
        total_s = parts.compute_s + parts.transfer_s + parts.reduce_s + parts.optimizer_s + parts.idle_s
        assert total_s == pytest.approx(prediction.step_s)
        assert [parts.reduce_s, parts.optimizer_s] == pytest.approx([7, 3])
        assert parts.transfer_s > 0
        assert 0 < parts.bubble < 1


def test_gradients_that_cross_as_bf16_take_half_as_long_and_as_much_memory() -> None:
    facts = model([section()] * 4)
    network = NetworkCosts(link=Link(latency_s=0, bytes_per_s=1e15), rings=(Ring(latency_s=0, bytes_per_s=1200 * MB),))
    known = calibrated(facts, across_vms=network)
    two = plan((0,), 4, replicas=2)
    reduce_s = [
        pipeline_costs(profile(each, 1), two, gpus_per_vm=1).stages[0].allreduce_s for each in (known, known.rounded())
    ]
    assert reduce_s[0] - reduce_s[1] == pytest.approx(200 * MB / (1200 * MB), rel=0.1)  # 200 of 400 MB less
    job = JobFacts(model=facts, global_batch=8, micro_batch=1, seed=0, steps=1, memory_apart=True)
    whole = plan_run(job, workers=equal_workers(2), stages=1, calibrations=Calibrations.of_one(known))
    less = plan_run(
        job.model_copy(update={"network": Network(reduction="bf16")}),
        workers=equal_workers(2),
        stages=1,
        calibrations=Calibrations.of_one(known),
    )
    assert (whole.replicas, less.replicas) == (1, 2)  # now a second worker is worth its ring
    assert less.first.memory_bytes == whole.first.memory_bytes


def test_copies_at_the_ends_of_a_link_are_latency_and_keep_no_other_message_waiting() -> None:
    facts, shape = model([section(0.5)] * 2), plan((0, 1), 2)
    staged = ROUND.link.model_copy(update={"staged_s": 0.25, "staged_bytes_per_s": 2 * MB})
    [plain], [copied] = (
        pipeline_costs(of(facts, 1, across_vms=ROUND.model_copy(update={"link": link})), shape, gpus_per_vm=1).links
        for link in (ROUND.link, staged)
    )
    assert copied.latency_s == pytest.approx(plain.latency_s + 0.25 + 1.0)
    assert (copied.activation_s, copied.gradient_s) == (plain.activation_s, plain.gradient_s)
