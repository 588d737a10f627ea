"""Pipelines of two depths: every worker has a seat, no step is longer for it, and none where they may not be."""

import pytest

from tests.depth import by_depth
from tests.unit.planner.models import FAST, MB, calibrated, model, request, section
from varuna.calibration.format import Calibrations
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.sweep import rank_depths, rank_plans

FACTS = model([section(parameter_bytes=MB)] * 12)
KNOWN = calibrated(FACTS, across_vms=FAST)


def asked(workers: int, **rest: object) -> PlanRequest:
    given = {"micro_batch": 1, "calibration": KNOWN, **rest}
    return request(FACTS, workers, 96, **given)


def deep(workers: int, **rest: object) -> PlanRequest:
    """Three stages are wanted at least: fewer do not fit."""
    least = max(rank_plans(asked(3, stages=3, mixes=False)).plans[0].first.memory_bytes)
    return asked(workers, memory_bytes=least + MB, **rest)


@pytest.mark.parametrize("workers", by_depth([7], [7, 8, 10, 11]))
def test_no_worker_is_left_over(workers: int) -> None:
    wanted = deep(workers)
    alike, best = best_plan(wanted.model_copy(update={"mixes": False})), best_plan(wanted)
    assert best.step_s <= alike.step_s
    if alike.workers < workers and not best.is_uniform:
        assert best.workers == workers
        assert best.step_s < 0.99 * alike.step_s
        assert sorted({*best.depths}) == [min(best.depths), min(best.depths) + 1]
        shares = dict(zip(best.depths, best.shares, strict=True))
        assert shares[max(best.depths)] > shares[min(best.depths)]


@pytest.mark.nightly
def test_some_counts_do_get_pipelines_of_two_depths() -> None:
    found = [best_plan(deep(workers)) for workers in range(6, by_depth(9, 13))]
    assert any(not plan.is_uniform for plan in found)
    times = [plan.step_s for plan in found]
    assert times == sorted(times, reverse=True)  # one worker more is never worse


def test_each_pipeline_is_cut_for_its_own_depth_and_fits() -> None:
    wanted = deep(11)
    [plan] = rank_depths(wanted, (4, 4, 3)).plans
    assert plan.shape == "4x2+3x1"
    assert plan.workers == 11
    for _, cut in plan.kinds:
        assert [each for stage in range(cut.stages) for each in cut.sections_of(stage)] == list(range(12))
    assert wanted.memory_bytes is not None
    assert max(size for _, cut in plan.kinds for size in cut.memory_bytes) <= wanted.memory_bytes


def test_depths_that_do_not_fit_have_no_plan() -> None:
    assert rank_depths(deep(8), (4, 3, 1)).plans == ()


def test_whoever_fixes_a_depth_gets_it_everywhere() -> None:
    for workers in (7, 11):
        assert best_plan(deep(workers, stages=3)).is_uniform


def test_nominal_figures_are_no_reason_for_other_depths() -> None:
    assert all(best_plan(deep(workers, leaves_idle=False)).is_uniform for workers in by_depth((7,), range(6, 13)))


@pytest.mark.nightly
def test_replicas_that_share_optimizer_state_are_cut_alike() -> None:
    shared = KNOWN.with_sharded_optimizer()
    assert all(
        best_plan(deep(workers).model_copy(update={"calibrations": Calibrations.of_one(shared)})).is_uniform
        for workers in (7, 8, 11)
    )
