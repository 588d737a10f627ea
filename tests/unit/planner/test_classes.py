"""Devices of several classes: a pipeline is of one, all end together, and nobody is slower for it than without."""

from functools import reduce
from itertools import product
from statistics import mean
from typing import Any

import pytest

from tests.depth import by_depth, nightly
from tests.unit.planner.models import FAST, MB, calibrated, model, request, section
from varuna.calibration.format import Calibration, Calibrations, SectionKind
from varuna.core.devices import WorkerGroup
from varuna.core.errors import NoPlanError
from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.one_class import equal_pipelines
from varuna.planner.report import report
from varuna.planner.sweep import rank_depths, rank_plans
from varuna.planner.unlike import deal_batch

FACTS = model([section(parameter_bytes=MB)] * 12)


def _slower(kind: SectionKind, factor: float) -> SectionKind:
    names = ("forward_s", "backward_s", "recompute_s", "input_s", "weight_s")
    return kind.model_copy(update={name: tuple(factor * s for s in getattr(kind, name)) for name in names})


def of_class(name: str, factor: float = 1.0, **hardware: object) -> Calibrations:
    known = calibrated(FACTS, across_vms=FAST)
    kinds = {kind: _slower(each, factor) for kind, each in known.kinds.items()}
    update = {"kinds": kinds, "hardware": known.hardware.model_copy(update=hardware)}
    return Calibrations.of_one(known.model_copy(update=update), name)


def asked(workers: dict[str, int], *calibrations: Calibrations, **rest: object) -> PlanRequest:
    groups = tuple(WorkerGroup.of_class(name, count) for name, count in workers.items())
    given: dict[str, Any] = {"micro_batch": 1, "global_batch": 96, **rest}
    known = reduce(Calibrations.joined, calibrations)
    return request(FACTS, groups, given.pop("global_batch"), **given).model_copy(update={"calibrations": known})


def shares(plan: Plan) -> dict[str, int]:
    """Micro-batches of a worker, by class."""
    found: dict[str, int] = {}
    for replicas, cut in plan.kinds:
        found[cut.device_class] = found.get(cut.device_class, 0) + sum(plan.shares[each] for each in replicas)
    return found


@pytest.mark.parametrize("factor", [3.0, *nightly(1.7, 8.0)])
def test_all_end_together_near_the_sum_of_their_speeds(factor: float) -> None:
    wanted = asked({"A": 2, "B": 4}, of_class("A"), of_class("B", factor), global_batch=480)
    plan = best_plan(wanted)
    assert plan.classes == {"A": 2, "B": 4}
    alone = best_plan(request(FACTS, 1, 480, micro_batch=1, calibration=of_class("A").first)).step_s
    bound_s = alone / (2 + 4 / factor)
    assert 0.999 * bound_s <= plan.step_s <= 1.08 * bound_s
    slowest_s = best_plan(wanted.as_slowest()).step_s
    assert plan.step_s <= slowest_s / (factor * 2 + 4) * 6 * 1.08
    assert shares(plan)["A"] / 2 > shares(plan)["B"] / 4


def test_it_is_never_slower_than_the_best_class_alone() -> None:
    for count in by_depth((2,), (1, 2, 5)):
        for factor in by_depth((2.0, 500.0), (2.0, 20.0, 500.0)):
            calibrations = of_class("A"), of_class("B", factor)
            plan = best_plan(asked({"A": 3, "B": count}, *calibrations))
            alone = best_plan(asked({"A": 3}, calibrations[0]))
            assert plan.step_s <= alone.step_s
            assert plan.classes["A"] == 3


def test_pipelines_have_the_depths_that_were_asked_for_on_whatever_classes() -> None:
    for counts in ({"A": 7}, {"A": 5, "B": 4}):
        [plan] = rank_depths(asked(counts, of_class("A"), of_class("B", 1.2)), (4, 3)).plans
        assert plan.shape == "4x1+3x1"


def test_classes_that_take_no_time_at_all_get_a_plan() -> None:
    plan = best_plan(asked({"A": 2, "B": 3}, of_class("A", 0.0), of_class("B", 0.0), leaves_idle=False))
    assert plan.workers == 5


def test_a_class_that_is_too_slow_to_help_idles() -> None:
    plan = best_plan(asked({"A": 8, "B": 1}, of_class("A"), of_class("B", 500.0)))
    assert plan.classes == {"A": 8}


def test_a_mix_may_leave_one_class_of_three_out() -> None:
    plan = best_plan(asked({"A": 4, "B": 4, "C": 1}, of_class("A"), of_class("B", 1.8), of_class("C", 900.0)))
    assert set(plan.classes) == {"A", "B"}


def test_each_class_is_cut_for_its_own_memory() -> None:
    whole = sum(best_plan(asked({"A": 1}, of_class("A"))).first.memory_bytes)
    calibrations = of_class("A"), of_class("B", 2.0, memory_bytes=whole // 3)
    plan = best_plan(asked({"A": 2, "B": 8}, *calibrations))
    assert set(plan.classes) == {"A", "B"}
    for _, cut in plan.kinds:
        assert cut.device_class == "A" or max(cut.memory_bytes) <= whole // 3


@pytest.mark.nightly
def test_memory_that_workers_tell_counts_where_none_was_calibrated() -> None:
    whole = sum(best_plan(asked({"A": 1}, of_class("A"))).first.memory_bytes)
    wanted = asked({"A": 2, "B": 8}, of_class("A"), of_class("B", 2.0))
    told = (WorkerGroup.of_class("A", 2), WorkerGroup.of_class("B", 8, memory_bytes=whole // 3))
    plan = best_plan(wanted.model_copy(update={"workers": told}))
    assert all(max(cut.memory_bytes) <= whole // 3 for _, cut in plan.kinds if cut.device_class == "B")


def test_a_class_that_holds_no_section_is_left_out_and_named() -> None:
    ranking = rank_plans(asked({"A": 2, "B": 4}, of_class("A"), of_class("B", 2.0, memory_bytes=1000)))
    assert ranking.plans[0].classes == {"A": 2}
    [rejection] = ranking.rejected
    assert rejection.device_class == "B"
    assert rejection.reason.startswith("4 of B alone: ")


def test_where_no_class_is_enough_alone_one_pipeline_has_several() -> None:
    whole = sum(best_plan(asked({"A": 1}, of_class("A"))).first.memory_bytes)
    limits = {"memory_bytes": whole // 3}
    plan = best_plan(asked({"A": 2, "B": 2}, of_class("A", **limits), of_class("B", 2.0, **limits)))
    assert plan.classes == {"A": 2, "B": 2}
    assert plan.stages == 4
    with pytest.raises(NoPlanError):
        best_plan(asked({"A": 1, "B": 1}, of_class("A", **limits), of_class("B", 2.0, **limits)))


def test_nominal_figures_send_nobody_away_and_tell_classes_apart() -> None:
    same = of_class("A")
    plan = best_plan(asked({"A": 3, "B": 2}, same, leaves_idle=False))
    assert plan.workers == 5
    assert set(plan.classes) == {"A", "B"}
    assert max(plan.shares) - min(plan.shares) <= 1 or not plan.is_uniform


def test_replicas_that_divide_optimizer_state_are_all_as_the_slowest() -> None:
    wanted = asked({"A": 2, "B": 2}, of_class("A"), of_class("B", 1.2))
    shared = wanted.model_copy(update={"calibrations": wanted.calibrations.each(Calibration.with_sharded_optimizer)})
    assert best_plan(shared).is_uniform


def test_the_cheapest_plan_weighs_prices_of_classes() -> None:
    dear, cheap = of_class("A", price_per_hour=10.0), of_class("B", 2.0, price_per_hour=1.0)
    wanted = asked({"A": 2, "B": 2}, dear, cheap)
    assert set(best_plan(wanted).classes) == {"A", "B"}
    assert best_plan(wanted.model_copy(update={"objective": "dollar"})).classes.keys() == {"B"}
    assert wanted.hourly({"A": 2, "B": 1}) == 21.0


def test_batches_too_small_for_all_leave_some_out() -> None:
    plan = best_plan(asked({"A": 2, "B": 3}, of_class("A"), of_class("B", 1.1), global_batch=3))
    assert plan.micro_batches == 3
    assert plan.replicas <= 3


@pytest.mark.nightly
def test_small_mixes_are_as_good_as_the_best_of_all_pairs_of_equal_pipelines() -> None:
    """Within 2 % on average and 5 % at worst of every depth and number of pipelines in each class."""
    excesses = []
    counts, factors = by_depth(((1, 3), (2,)), ((1, 3, 4), (2, 5))), (1.3, 2.5, 6.0)
    for first, second, factor in product(*counts, factors):
        wanted = asked({"A": first, "B": second}, of_class("A"), of_class("B", factor), global_batch=60)
        excesses.append(best_plan(wanted).step_s / _exhaustive_s(wanted) - 1)
    assert mean(excesses) <= 0.02
    assert max(excesses) <= 0.05


def _exhaustive_s(wanted: PlanRequest) -> float:
    best_s = float("inf")
    shapes = [
        [(stages, replicas) for stages in range(1, group.count + 1) for replicas in range(1, group.count // stages + 1)]
        for group in wanted.workers
    ]
    for chosen in product(*shapes):
        kinds = []
        for name, (stages, replicas) in zip(wanted.classes, chosen, strict=True):
            alone = equal_pipelines(wanted.of_class(name), stages, replicas, 1)
            if alone is not None:
                named = {"device_class": name, "pace": 1 / alone.step_s, "speeds": ()}
                kinds.append((alone.plan.first.model_copy(update=named), alone.plan))
        kinds.sort(key=lambda each: -each[0].pace)
        scaled = [kind.model_copy(update={"pace": kind.pace / kinds[0][0].pace}) for kind, _ in kinds]
        best_s = min(best_s, deal_batch(scaled, kinds[0][1], wanted).step_s)
    return best_s


def test_the_report_says_what_each_class_does_and_why_one_idles() -> None:
    wanted = asked({"A": 2, "B": 4, "C": 3}, of_class("A"), of_class("B", 3.0), of_class("C", 2.0, memory_bytes=1000))
    found = report(wanted, rank_plans(wanted), price_per_hour=None)
    assert found.hardware == "2 x nominal + 4 x nominal + 3 x nominal"
    first = found.plans[0]
    assert {each.name: (each.shape, each.gpus) for each in first.classes} == {"A": ("1x2", 2), "B": ("1x4", 4)}
    assert sum(each.micro_batches for each in first.classes) == 96
    [why] = found.idle
    assert why.startswith("3 of 3 C idle: stage ")
    slow = asked({"A": 8, "B": 1}, of_class("A"), of_class("B", 500.0))
    [why] = report(slow, rank_plans(slow), price_per_hour=1.0).idle
    assert why.startswith("1 of 1 B idle: with more of them a step takes ")


def test_calibrations_go_together_by_class() -> None:
    first, second = of_class("A"), of_class("B", 2.0)
    both = first.joined(second)
    assert both.names == ("A", "B")
    assert both.only("A") == first
    assert both.of("B") == both.of("C") == both.of("") == second.first, "of what is not known, the slowest"
    newer = of_class("A", 1.5)
    assert both.joined(newer).of("A") == newer.first
    assert both.joined(newer).names == both.joined(of_class("B", 4.0)).names == ("A", "B")
    unnamed = of_class("", 3.0)
    assert both.joined(unnamed).without_any() == both
    assert unnamed.without_any() == unnamed
    assert both.joined(unnamed).named().names == ("A", "B", "nominal")
    with pytest.raises(ValueError, match="different models"):
        first.joined(Calibrations.of_one(calibrated(model([section()] * 3)), "B"))
