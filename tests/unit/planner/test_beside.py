"""Pipelines of one class beside some that run on several: a scarce class takes only a part of the others with it."""

import pytest

from tests.depth import by_depth
from tests.unit.planner.test_classes import asked, of_class
from tests.unit.planner.test_spanning import whole_bytes
from varuna.fleet.feedback.refine import predicted
from varuna.planner import classes
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.sweep import rank_plans


def wanted(scarce: int, others: int) -> PlanRequest:
    """A scarce class without the memory for a pipeline of its own, and slower ones with it."""
    half = of_class("A", memory_bytes=whole_bytes() * 2 // 3)
    return asked({"A": scarce, "B": others}, half, of_class("B", 2.0), global_batch=192)


def test_a_scarce_class_takes_only_a_part_of_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = best_plan(wanted(1, 7))
    assert plan.classes == {"A": 1, "B": 7}
    spanning = [cut for _, cut in plan.kinds if cut.stage_classes]
    assert len(spanning) == 1
    assert any(cut.device_class == "B" for _, cut in plan.kinds)
    assert predicted(wanted(1, 7).calibrations, plan).step_s == pytest.approx(plan.step_s)
    monkeypatch.setattr(classes, "with_pipelines_beside", lambda *given: [])
    assert plan.step_s < best_plan(wanted(1, 7)).step_s


@pytest.mark.parametrize("counts", by_depth([(1, 3)], [(1, 3), (1, 7), (2, 5), (3, 8)]))
def test_it_is_never_slower_than_without(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]) -> None:
    best = best_plan(wanted(*counts))
    for plan in rank_plans(wanted(*counts)).plans:
        assert sum(plan.shares) == plan.micro_batches
        assert all(count <= plan.workers for count in plan.classes.values())
        assert plan.classes.get("A", 0) <= counts[0]
        assert plan.classes.get("B", 0) <= counts[1]
    monkeypatch.setattr(classes, "with_pipelines_beside", lambda *given: [])
    assert best.step_s <= best_plan(wanted(*counts)).step_s
