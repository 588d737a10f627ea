"""Pipelines over devices of several classes: each stage gets what its own device can hold, and can run in time."""

from itertools import combinations, permutations
from statistics import mean

import pytest

from tests.depth import by_depth
from tests.unit.planner.test_classes import asked, of_class
from varuna.calibration.format import Calibrations
from varuna.core.plan import Plan
from varuna.fleet.feedback.refine import predicted
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.report import report
from varuna.planner.spanning import spanning
from varuna.planner.sweep import rank_plans


def stage_s(plan: Plan, known: Calibrations) -> list[float]:
    """Seconds of a micro-batch, by stage."""
    stages = predicted(known, plan).trace.costs.stages
    last = len(stages) - 1
    return [
        stage.forward_s + stage.backward_s + (0.0 if k == last or stage.keeps_all else stage.recompute_s)
        for k, stage in enumerate(stages)
    ]


def whole_bytes() -> int:
    return sum(best_plan(asked({"A": 1}, of_class("A"))).first.memory_bytes)


def test_a_class_that_is_too_small_for_a_pipeline_works_in_those_of_others() -> None:
    half = of_class("A", memory_bytes=whole_bytes() * 2 // 3)
    wanted = asked({"A": 1, "B": 6}, half, of_class("B", 4.0), global_batch=960)
    plan = best_plan(wanted)
    assert plan.classes == {"A": 1, "B": 6}
    assert plan.stages == 7
    alone = best_plan(asked({"B": 6}, of_class("B", 4.0), global_batch=960))
    assert plan.step_s < 0.8 * alone.step_s, "1 + 6/4 where it was 6/4"
    longest = len(plan.first.sections_of(plan.first.stage_classes.index("A")))
    assert longest == max(len(plan.first.sections_of(stage)) for stage in range(7))


@pytest.mark.parametrize("counts", [(1, 3), (2, 3), (1, 6), (3, 6)])
def test_memory_is_each_devices_own_and_no_stage_waits_long_for_another(counts: tuple[int, int]) -> None:
    limits = {"A": whole_bytes() // 2, "B": whole_bytes() // 3}
    calibrations = of_class("A", memory_bytes=limits["A"]), of_class("B", 2.0, memory_bytes=limits["B"])
    wanted = asked({"A": counts[0], "B": counts[1]}, *calibrations, global_batch=480)
    [first, *_] = spanning(wanted, [1])
    plan = first.plan
    cut = plan.first
    assert len(set(plan.first.stage_classes)) == 2
    assert all(need <= limits[cut.class_of(k)] for k, need in enumerate(cut.memory_bytes))
    changes = sum(a != b for a, b in zip(plan.first.stage_classes, plan.first.stage_classes[1:], strict=False))
    assert changes == 1, "those of one class are neighbours"
    times = stage_s(plan, wanted.calibrations)
    assert max(times) <= 2.1 * mean(times), "twelve sections cannot be divided"
    assert predicted(wanted.calibrations, plan).step_s == pytest.approx(plan.step_s)


def every(wanted: PlanRequest, like: Plan) -> list[float]:
    """Steps of all plans with one pipeline: every order of the classes, every cut, with the depths of ``like``."""
    found = []
    for classes in set(permutations(like.first.stage_classes)):
        for starts in combinations(range(1, like.sections), like.stages - 1):
            tried = like.with_each_pipeline(bounds=(0, *starts, like.sections), stage_classes=classes, kept=())
            found.append(predicted(wanted.calibrations, tried).step_s)
    return found


@pytest.mark.parametrize("factor", by_depth([2.0], [1.3, 2.0, 5.0]))
@pytest.mark.parametrize("counts", by_depth([(1, 2)], [(1, 2), (2, 1), (1, 3)]))
def test_no_other_cut_is_much_better(counts: tuple[int, int], factor: float) -> None:
    wanted = asked({"A": counts[0], "B": counts[1]}, of_class("A"), of_class("B", factor), global_batch=96)
    found = next(each.plan for each in spanning(wanted, [1]) if each.plan.replicas == 1)
    assert found.step_s <= 1.05 * min(every(wanted, found))


def test_nothing_is_slower_for_it() -> None:
    for factor in by_depth((3.0,), (1.2, 3.0, 30.0)):
        for counts in by_depth([{"A": 1, "B": 3}], [{"A": 1, "B": 3}, {"A": 4, "B": 4}, {"A": 2, "B": 9}]):
            wanted = asked(counts, of_class("A"), of_class("B", factor))
            spans = spanning(wanted, [1])
            best = best_plan(wanted)
            assert all(best.step_s <= each.step_s * 1.0001 for each in spans)


def test_a_report_says_what_each_class_does() -> None:
    limits = {"memory_bytes": whole_bytes() // 3}
    wanted = asked({"A": 2, "B": 2}, of_class("A", **limits), of_class("B", 2.0, **limits))
    found = report(wanted, rank_plans(wanted), price_per_hour=None)
    told = {(each.name, each.shape, each.gpus) for each in found.plans[0].classes}
    assert told == {("A", "2/4x1", 2), ("B", "2/4x1", 2)}
    assert found.idle == ()


def test_vms_of_several_gpus_are_not_divided() -> None:
    wanted = asked({"A": 4, "B": 4}, of_class("A", gpus_per_vm=4), of_class("B", 2.0, gpus_per_vm=4), global_batch=96)
    assert {each.plan.replicas for each in spanning(wanted, [1])} == {1}


def test_where_links_are_between_gpus_or_state_is_shared_no_pipeline_has_several() -> None:
    limits = {"memory_bytes": whole_bytes() // 3}
    calibrations = of_class("A", **limits), of_class("B", 2.0, **limits)
    assert best_plan(asked({"A": 2, "B": 2}, *calibrations, mixes=False)).classes == {"": 4}


def test_a_class_that_holds_no_section_is_left_out_of_the_others_pipelines() -> None:
    limits = {"memory_bytes": whole_bytes() // 3}
    calibrations = of_class("A", **limits), of_class("B", 2.0, **limits), of_class("C", 2.0, memory_bytes=1000)
    plan = best_plan(asked({"A": 2, "B": 2, "C": 3}, *calibrations))
    assert plan.classes == {"A": 2, "B": 2}
