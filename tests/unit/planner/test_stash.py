"""Inputs that wait for R in host memory: when the planner lets them, and what it counts for it."""

from typing import Any

import pytest

from tests.unit.planner.models import FAST, GB, MB, calibrated, model, section
from varuna.calibration.format import Calibrations, Hardware, OptimizerCosts
from varuna.core.devices import equal_workers
from varuna.core.errors import NoPlanError
from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spans import Spans, pinned_bytes
from varuna.planner.pricing.stage_size import Size, Sizer
from varuna.schedule.buffers import STASH_IN_TRANSIT

LARGE = model([section(boundary_bytes=200 * MB, activation_bytes=300 * MB)] * 8)  # inputs as heavy as state
TIGHT, ROOMY = 3_800 * MB, 4_800 * MB
HARDWARE = Hardware(name="test")


def sizer(limit_bytes: int, *, moves: bool = True, host_limit_bytes: int | None = None) -> Sizer:
    spans = Spans(profile(calibrated(LARGE), 1), limit_bytes=limit_bytes, host_limit_bytes=host_limit_bytes)
    return Sizer([spans] * 4, wanted=(10, 10, 10, 1), least=(3, 3, 2, 1), may_keep=True, stash_moves=moves)


def planned(memory_bytes: int, *, moves: bool = True, **changes: Any) -> Plan:
    calibration = calibrated(LARGE, hardware=HARDWARE, across_vms=FAST, **changes)
    return best_plan(
        PlanRequest(
            calibrations=Calibrations.of_one(calibration),
            workers=equal_workers(8),
            stages=8,
            global_batch=40,
            micro_batch=1,
            memory_bytes=memory_bytes,
            memory_apart=moves,
        )
    )


def test_what_does_not_fit_moves_and_what_is_on_its_way_counts() -> None:
    everything = sizer(10 * GB).detail(1, 2, 4, Size(10, 0)).total
    limit = everything - 4 * 200 * MB
    assert sizer(limit, moves=False).size(1, 2, 4) == Size(6, 0)
    found = sizer(limit)
    size = found.size(1, 2, 4)
    assert size == Size(10, 0, 7)
    detail = found.detail(1, 2, 4, size)
    assert detail.total == limit
    assert detail.stash == (10 - 7 + STASH_IN_TRANSIT) * 200 * MB
    assert detail.host == 7 * 200 * MB
    roomier = sizer(everything + 9 * (300 + 200) * MB - 4 * 200 * MB)
    assert roomier.size(1, 2, 4) == Size(10, 1, 7)  # what they make room for is kept first


def test_a_stage_with_room_for_all_moves_nothing() -> None:
    assert sizer(100 * GB).size(1, 2, 4) == Size(10, 1)  # of its two sections one is left that R begins with
    assert sizer(100 * GB).size(3, 6, 8) == Size(1, 0)


def test_host_memory_bounds_what_moves() -> None:
    everything = sizer(10 * GB).detail(1, 2, 4, Size(10, 0)).total
    limit = everything - 4 * 200 * MB
    assert sizer(limit, host_limit_bytes=1100 * MB).size(1, 2, 4) == Size(8, 0, 5)
    assert sizer(limit, host_limit_bytes=300 * MB).size(1, 2, 4) == Size(6, 0)
    assert sizer(limit, host_limit_bytes=0).size(1, 2, 4) == Size(6, 0)


def test_the_stash_moves_where_a_plan_fits_no_other_way() -> None:
    with pytest.raises(NoPlanError, match="too little"):
        planned(TIGHT, moves=False)
    plan = planned(TIGHT)
    assert max(plan.first.memory_bytes) <= TIGHT
    assert plan.first.stash_on_device[1] < plan.first.stash_limits[1]
    moved = [limit - stay for limit, stay in zip(plan.first.stash_limits, plan.first.stash_on_device, strict=True)]
    pinned = pinned_bytes(profile(calibrated(LARGE), 1), range(1), 1)
    inputs = (0, *(count * 200 * MB for count in moved[1:]))  # stage 0 reads nothing here
    assert plan.first.host_bytes == tuple(each + pinned for each in inputs)


def test_the_stash_moves_where_that_makes_a_faster_plan_fit() -> None:
    plan, other = planned(ROOMY), planned(ROOMY, moves=False)
    assert plan.step_s < other.step_s
    assert plan.first.stash_on_device
    assert not other.first.stash_on_device


def test_a_plan_that_fits_leaves_the_stash_where_it_is() -> None:
    assert planned(40 * GB).first.stash_on_device == ()
    assert planned(40 * GB).with_each_pipeline(host_bytes=()) == planned(40 * GB, moves=False)


def test_a_slow_way_between_the_memories_makes_recomputation_wait() -> None:
    plan = planned(TIGHT)

    def pace_s(bytes_per_s: float, *, plan: Plan = plan) -> float:
        calibration = calibrated(LARGE, optimizer=OptimizerCosts(host_bytes_per_s=bytes_per_s))
        stage = pipeline_costs(profile(calibration, 1), plan, gpus_per_vm=1).stages[1]
        return stage.forward_s + stage.recompute_s + stage.backward_s

    moved = (plan.first.stash_limits[1] - plan.first.stash_on_device[1]) / plan.first.stash_limits[1]
    assert pace_s(1 * GB) == pytest.approx(2 * 200 * MB * moved / GB)
    assert pace_s(1000 * GB) == pace_s(1 * GB, plan=plan.with_each_pipeline(stash_on_device=()))  # copies hide
