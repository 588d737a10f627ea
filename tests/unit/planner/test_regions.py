"""Workers in several regions: a pipeline stays in one, replicas go across where that pays, as far as anybody knows."""

import pytest

from tests.unit.planner.models import FAST
from tests.unit.planner.test_classes import asked, of_class
from varuna.calibration.format import Calibrations, Link, NetworkCosts, Ring
from varuna.core.devices import class_in, device_of, region_of
from varuna.core.plan import Plan
from varuna.fleet.feedback.refine import predicted
from varuna.planner.choose import best_plan
from varuna.planner.sweep import rank_plans

A, B = class_in("V100", "east"), class_in("V100", "west")
SLOW = NetworkCosts(link=Link(latency_s=5.0, bytes_per_s=1e5), rings=(Ring(latency_s=5.0, bytes_per_s=1e5),))


def known(across_regions: NetworkCosts | None = FAST, device: str = "V100", factor: float = 1.0) -> Calibrations:
    return of_class(device, factor).model_copy(update={"across_regions": across_regions})


def regions_of(plan: Plan) -> list[set[str]]:
    """Of each replica, where its workers are."""
    return [{region_of(plan.class_of(rank)) for rank in plan.ranks_of(replica)} for replica in range(plan.replicas)]


@pytest.mark.parametrize("counts", [(4, 4), (5, 3), (7, 2), (3, 3)])
def test_every_pipeline_is_in_one_region_and_all_work_where_the_network_is_good(counts: tuple[int, int]) -> None:
    for plan in rank_plans(asked({A: counts[0], B: counts[1]}, known(), global_batch=480, wanted=3)).plans:
        assert all(len(places) == 1 for places in regions_of(plan))
    best = best_plan(asked({A: counts[0], B: counts[1]}, known(), global_batch=480))
    assert best.workers == sum(counts)
    assert {region_of(name) for name in best.classes} == {"east", "west"}


def test_a_region_idles_whose_sums_would_take_longer_than_it_saves() -> None:
    plan = best_plan(asked({A: 4, B: 2}, known(SLOW)))
    assert plan.classes == {A: 4}
    near = best_plan(asked({A: 4, B: 2}, known(), global_batch=480))
    assert near.classes == {A: 4, B: 2}


def test_a_network_that_nobody_measured_is_between_the_two() -> None:
    """Within a region sums take less time, and over a bad line more."""
    steps_s = [
        best_plan(asked({A: 2, B: 2}, known(network), global_batch=480, stages=1)).step_s for network in (FAST, None)
    ]
    assert steps_s[0] < steps_s[1]


def test_a_pipeline_reaches_over_regions_only_if_nothing_fits_otherwise() -> None:
    whole = sum(best_plan(asked({"V100": 1}, known())).first.memory_bytes)
    hardware = known().first.hardware.model_copy(update={"memory_bytes": whole * 2 // 3})
    small = known(None).each(lambda each: each.model_copy(update={"hardware": hardware}))
    assert best_plan(asked({A: 1, B: 2}, small)).classes == {B: 2}, "one in the east holds no pipeline"
    plan = best_plan(asked({A: 1, B: 1}, small))
    assert plan.stages == 2
    assert plan.step_s > best_plan(asked({"V100": 2}, small)).step_s, "its messages go from region to region"
    if plan.first.stage_classes:
        assert predicted(small, plan).step_s == pytest.approx(plan.step_s)


def test_within_a_region_devices_of_several_classes_mix_as_ever() -> None:
    """A plan for all of one region is considered, whatever others have."""
    fast, slow = class_in("A100", "east"), class_in("V100", "east")
    both = known(SLOW, "A100").joined(known(SLOW, "V100", 2.0))
    plan = best_plan(asked({fast: 2, slow: 4, B: 1}, both, global_batch=480))
    assert plan.classes == {fast: 2, slow: 4}


def test_a_device_is_as_fast_everywhere_until_somebody_knows_better() -> None:
    both = known().joined(of_class("A100", 0.5))
    assert both.nearest(class_in("A100", "west")) == "A100"
    seen = both.joined(of_class(class_in("A100", "west"), 0.4))
    assert seen.of(class_in("A100", "west")).compute_s(1) < seen.of(class_in("A100", "east")).compute_s(1)
    assert device_of(seen.nearest(class_in("A100", "north"))) == "A100"
    assert seen.across_regions == both.across_regions
