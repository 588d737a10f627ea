"""Optimizer state shared out among replicas: what the fullest of them holds, and what the gather takes."""

import pytest

from tests.unit.planner.models import FAST, MB, calibrated, model, section
from varuna.calibration.format import Calibration, Calibrations
from varuna.core.devices import equal_workers
from varuna.core.model import JobFacts, Memory
from varuna.core.plan import Pipeline, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import plan_run
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.network import reduce_s
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spans import Replication, Spans
from varuna.planner.pricing.stage_size import Size, Sizer
from varuna.planner.sweep import rank_plans

FOUR = model([section()] * 4)  # of each 100 MB of parameters and of gradients, and 200 MB of state
LITTLE = 1500 * MB  # one worker alone needs 1800, and 1400 if eight share state out


def sizer(calibration: Calibration, replicas: int) -> Sizer:
    spans = Spans(profile(calibration, 1), replication=Replication(sharing=replicas))
    return Sizer([spans], wanted=[1], least=[1], may_keep=False)


@pytest.mark.parametrize(("replicas", "held"), [(1, 4), (2, 4), (3, 3), (4, 2), (8, 1)])
def test_the_fullest_replica_counts(replicas: int, held: int) -> None:
    stage = sizer(calibrated(FOUR).with_sharded_optimizer(), replicas).detail(0, 0, 4, Size(1, 0))
    assert stage.optimizer == held * 200 * MB
    assert stage.parameters == stage.gradients == 400 * MB
    assert sizer(calibrated(FOUR), replicas).detail(0, 0, 4, Size(1, 0)).optimizer == 800 * MB


def test_what_is_on_its_way_counts_when_nothing_else_is_in_flight() -> None:
    assert (
        sizer(calibrated(FOUR).with_sharded_optimizer(), 4).detail(0, 0, 4, Size(1, 0)).update == 400 * MB
    )  # one of each replica
    assert sizer(calibrated(FOUR).with_sharded_optimizer(), 2).detail(0, 0, 4, Size(1, 0)).update == 0


def test_offloaded_state_is_shared_out_in_host_memory() -> None:
    both = calibrated(FOUR).with_sharded_optimizer().offloaded()
    stage = sizer(both, 4).detail(0, 0, 4, Size(1, 0))
    assert (stage.optimizer, stage.host) == (0, 2 * 200 * MB)


def job(*, shared: bool) -> JobFacts:
    return JobFacts(model=FOUR, global_batch=8, micro_batch=1, seed=0, steps=1, memory=Memory(shard_optimizer=shared))


def test_a_jobs_plan_counts_it() -> None:
    fast = calibrated(FOUR, across_vms=FAST)
    plain, shared = (
        plan_run(job(shared=each), workers=equal_workers(4), stages=1, calibrations=Calibrations.of_one(fast))
        for each in (False, True)
    )
    assert (plain.replicas, shared.replicas) == (4, 4)
    spared = 400 - (400 - 200)  # the gather holds more than what was in flight before
    assert plain.first.memory_bytes[0] - shared.first.memory_bytes[0] == spared * MB


def test_the_gather_takes_half_an_all_reduce_of_the_parameters() -> None:
    calibration = calibrated(FOUR)
    plan = Plan(micro_batch=1, global_batch=8, pipelines=(Pipeline(replicas=4, bounds=(0, 4), stash_limits=(1,)),))
    plain, shared = (
        pipeline_costs(profile(known, 1), plan, gpus_per_vm=1)
        for known in (calibration, calibration.with_sharded_optimizer())
    )
    gather_s = 0.5 * reduce_s(calibration, 400 * MB, stages=1, replicas=4, gpus_per_vm=1, members=4)
    assert calibration.optimizer.bytes_per_s is None  # else the update takes less
    assert shared.optimizer_s == pytest.approx(plain.optimizer_s + gather_s)


def test_depths_that_fit_by_sharing_only_are_found_and_nobody_lacks_less_than_nothing() -> None:
    plain = calibrated(FOUR, across_vms=FAST)
    for known, fitting in ((plain, {2, 3, 4}), (plain.with_sharded_optimizer(), {1, 2, 3, 4})):
        found = rank_plans(
            PlanRequest(
                calibrations=Calibrations.of_one(known),
                workers=equal_workers(8),
                global_batch=16,
                memory_bytes=LITTLE,
                wanted=4,
            )
        )
        assert {plan.stages for plan in found.plans} == fitting
        assert all((rejection.missing_bytes or 0) > 0 for rejection in found.rejected)
