"""Slow workers within classes of devices: they get fewer micro-batches, and nobody is worse off for them."""

from itertools import product

import pytest

from tests.depth import by_depth, nightly
from tests.unit.planner.models import FAST, MB
from tests.unit.planner.test_classes import asked, of_class
from varuna.core import devices
from varuna.core.devices import WorkerGroup, WorkerGroups, class_in
from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.sweep import rank_plans


def speeds_of(plan: Plan) -> dict[str, list[float]]:
    """Speeds of pipelines, by class."""
    found: dict[str, list[float]] = {}
    for replicas, cut in plan.kinds:
        found.setdefault(cut.device_class, []).extend(map(plan.speed_of, replicas))
    return found


def slowed(workers: dict[str, tuple[float, ...]], factor: float = 2.0, **rest: object) -> PlanRequest:
    """For workers of classes A and B, by their speeds; B takes so many times as long."""
    request = asked({"A": 1}, of_class("A"), of_class("B", factor), **rest)
    return request.model_copy(update={"workers": groups_of(workers)})


def groups_of(workers: dict[str, tuple[float, ...]]) -> WorkerGroups:
    """A group for each worker, by class and speed."""
    return tuple(WorkerGroup.of_class(name, 1, speed=speed) for name, speeds in workers.items() for speed in speeds)


@pytest.mark.parametrize("slow", [0.5, *nightly(0.7)])
@pytest.mark.parametrize("slow_class", ["A", "B"])
def test_all_end_together_near_the_sum_of_their_speeds(slow: float, slow_class: str) -> None:
    workers = {"A": (1.0, 1.0), "B": (1.0, 1.0, 1.0)}
    workers[slow_class] = (*workers[slow_class][:-1], slow)
    plan = best_plan(slowed(workers, global_batch=480))
    assert plan.workers == 5
    assert speeds_of(plan) == {name: list(speeds) for name, speeds in workers.items()}
    alone_s = best_plan(asked({"A": 1}, of_class("A"), global_batch=480)).step_s
    assert 0.999 <= plan.step_s * (sum(workers["A"]) + sum(workers["B"]) / 2) / alone_s <= 1.08


def test_a_slow_worker_more_never_makes_steps_longer() -> None:
    counts, speeds = by_depth(((1,), (1, 4)), ((1, 3), (1, 4))), by_depth((0.3,), (0.8, 0.3, 0.02))
    for a, b, slow, name in product(*counts, speeds, "AB"):
        equal = {"A": (1.0,) * a, "B": (1.0,) * b}
        more = {**equal, name: (*equal[name], slow)}
        with_it, without = (best_plan(slowed(workers, global_batch=96)) for workers in (more, equal))
        assert with_it.step_s <= without.step_s * (1 + 1e-9)


@pytest.mark.nightly
def test_deep_pipelines_of_a_class_gather_its_slow_workers() -> None:
    whole = sum(best_plan(asked({"A": 1}, of_class("A"))).first.memory_bytes)
    known = of_class("A"), of_class("B", 2.0, memory_bytes=whole // 3)
    request = asked({"A": 2, "B": 8}, *known, global_batch=480)
    workers = groups_of({"A": (1.0,) * 2, "B": (*(1.0,) * 4, *(0.5,) * 4)})
    plan = best_plan(request.model_copy(update={"workers": workers}))
    assert plan.workers == 10
    assert all(cut.stages == 4 for _, cut in plan.kinds if cut.device_class == "B")
    assert speeds_of(plan) == {"A": [1.0, 1.0], "B": [1.0, 0.5]}
    assert plan.step_s < best_plan(asked({"A": 2, "B": 4}, *known, global_batch=480)).step_s


def test_pipelines_over_several_classes_are_as_fast_as_their_slowest_worker() -> None:
    whole = sum(best_plan(asked({"A": 1}, of_class("A"))).first.memory_bytes)
    known = of_class("A", memory_bytes=whole * 2 // 3), of_class("B", 2.0, memory_bytes=whole // 2)
    request = asked({"A": 1, "B": 1}, *known)
    plan = best_plan(request)
    assert set(plan.first.stage_classes) == {"A", "B"}
    slow = best_plan(request.model_copy(update={"workers": groups_of({"A": (1.0,), "B": (0.5,)})}))
    assert slow.first.stage_classes == plan.first.stage_classes
    assert slow.speeds == (0.5,)
    assert 1.5 * plan.step_s < slow.step_s < 2.1 * plan.step_s


def test_a_slow_worker_of_a_region_has_its_share_there() -> None:
    names = [class_in("A", region) for region in ("east", "west")]
    known = of_class("A").model_copy(update={"across_regions": FAST})
    request = asked({"A": 6}, known, global_batch=480)
    apart = request.model_copy(update={"workers": groups_of({names[0]: (1.0,) * 3, names[1]: (1.0, 1.0, 0.5)})})
    plan = best_plan(apart)
    assert speeds_of(plan) == {names[0]: [1.0, 1.0, 1.0], names[1]: [1.0, 1.0, 0.5]}


def test_each_part_of_a_question_keeps_the_speeds_of_its_workers() -> None:
    request = slowed({"A": (0.6, 1.0), "B": (0.9, 0.4, 0.3)})
    assert request.classes == ("A", "B")
    assert speeds(request.of_class("B")) == (0.9, 0.4, 0.3)
    assert speeds(request.of_classes(["B"])) == (0.9, 0.4, 0.3)
    assert speeds(request.with_count("B", 2)) == (1.0, 0.9, 0.6, 0.4)
    assert speeds(request.as_slowest()) == (1.0, 0.9, 0.6, 0.4, 0.3)


def test_a_share_of_the_workers_is_the_fastest_of_them() -> None:
    workers = groups_of({"": (0.4, 1.0, 0.9)})
    assert devices.speeds_of(devices.of_count(workers, 2)) == (1.0, 0.9)
    assert devices.speeds_of(devices.of_count(workers, 5)) == (1.0, 0.9, 0.4, 0.4, 0.4)
    assert devices.of_count((), 5) == devices.of_count(workers, 0) == ()


def speeds(request: PlanRequest) -> tuple[float, ...]:
    return devices.speeds_of(request.workers)


def test_memory_counts_for_slow_workers_too() -> None:
    ranking = rank_plans(slowed({"A": (1.0, 0.5), "B": (1.0, 0.5)}, memory_bytes=12 * MB))
    assert all(max(plan.first.memory_bytes) <= 12 * MB for plan in ranking.plans)
