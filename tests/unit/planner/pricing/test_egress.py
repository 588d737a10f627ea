"""Bytes that leave a region or a zone in a step, counted by hand."""

import pytest

from tests.unit.planner.test_classes import asked, of_class
from tests.unit.planner.test_regions import A, B, known
from varuna.core.devices import region_of
from varuna.core.plan import Plan
from varuna.planner.choose import best_plan
from varuna.planner.pricing.egress import crossing_bytes, seated
from varuna.planner.pricing.profile import profile


def regions(plan: Plan) -> list[str]:
    return [region_of(plan.class_of(rank)) for rank in range(plan.workers)]


def test_sums_leave_a_region_once_around_the_ring() -> None:
    plan = best_plan(asked({A: 4, B: 4}, known(), global_batch=480))
    size = sum(profile(known().first, plan.micro_batch).reduced_bytes.values)
    each = 2 * (plan.replicas - 1) / plan.replicas * size
    assert crossing_bytes(plan, known().first, regions(plan)) == pytest.approx(
        {("east", "west"): each, ("west", "east"): each}
    )


def test_nothing_leaves_one_region() -> None:
    plan = best_plan(asked({"A": 4}, of_class("A")))
    assert not crossing_bytes(plan, of_class("A").first, regions(plan))


def test_messages_of_a_pipeline_over_both_count() -> None:
    plan = best_plan(asked({A: 2}, known(), stages=2)).with_each_pipeline(device_class="", stage_classes=(A, B))
    figures, cut = profile(known().first, plan.micro_batch), plan.first.starts[1] - 1
    assert crossing_bytes(plan, known().first, regions(plan)) == pytest.approx(
        {
            ("east", "west"): plan.micro_batches * figures.boundary_bytes[cut],
            ("west", "east"): plan.micro_batches * figures.gradient_boundary_bytes[cut],
        }
    )


def test_pipelines_are_seated_zone_by_zone() -> None:
    plan = best_plan(asked({"A": 8}, of_class("A"), stages=2))
    assert plan.shape == "2x4"
    places = seated(plan, {"A": {"a": 4, "b": 4}})
    assert [places[2 * replica] for replica in range(4)] == [places[2 * replica + 1] for replica in range(4)]
    assert len([1 for here, after in zip(places, (*places[2:], *places[:2]), strict=True) if here != after]) == 2 * 2
    split = seated(plan, {"A": {"a": 5, "b": 3}})
    assert sorted(split) == ["a"] * 5 + ["b"] * 3
    assert [split[rank] == split[rank + 1] for rank in (0, 2, 4, 6)].count(False) == 1, "one reaches over both"


def test_sums_and_messages_cross_zones_where_pipelines_do() -> None:
    known = of_class("A")
    plan = best_plan(asked({"A": 4}, known, stages=2))
    figures = profile(known.first, plan.micro_batch)
    [size] = {figures.reduced_bytes.over(range(plan.sections))}
    apart = crossing_bytes(plan, known.first, ("a", "a", "b", "b"))
    assert apart == pytest.approx({("a", "b"): size, ("b", "a"): size})  # 2 (D - 1) / D of each section, D = 2
    across = crossing_bytes(plan, known.first, ("a", "b", "a", "b"))
    cut = plan.first.starts[1] - 1
    assert across == pytest.approx(
        {
            ("a", "b"): plan.micro_batches * figures.boundary_bytes[cut],
            ("b", "a"): plan.micro_batches * figures.gradient_boundary_bytes[cut],
        }
    )
    assert not crossing_bytes(plan, known.first, ("a",) * 4)
