"""The line that a plan needs: compute sets the pace on faster ones, and not on slower ones."""

from pathlib import Path

import pytest

from varuna.calibration.file import read_calibration
from varuna.core.devices import equal_workers
from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.line import HARDLY, Line, line_of
from varuna.planner.pricing.predict import predictions
from varuna.planner.sweep import rank_plans

KNOWN = Path(__file__).parents[3] / "examples" / "calibrations" / "gpt2-2.5b-v100.json"


def asked(**changed: object) -> tuple[Plan, PlanRequest]:
    request = PlanRequest(
        calibrations=read_calibration(KNOWN), workers=equal_workers(16), global_batch=256, wanted=1
    ).model_copy(update=changed)
    return rank_plans(request).plans[0], request


def at(request: PlanRequest, bits_per_s: float) -> PlanRequest:
    """The same with lines of another speed."""
    network = request.calibration.across_vms
    factor = bits_per_s / (8 * (network.link.line_bytes_per_s or network.link.bytes_per_s))
    link = network.link.at(latency_s=network.link.latency_s, bytes_per_s=factor * network.link.bytes_per_s)
    rings = tuple(each.at(latency_s=each.latency_s, bytes_per_s=factor * each.bytes_per_s) for each in network.rings)
    changed = network.model_copy(update={"link": link, "rings": rings})
    return request.model_copy(
        update={"calibrations": request.calibrations.each(lambda each: each.model_copy(update={"across_vms": changed}))}
    )


def step_s(plan: Plan, request: PlanRequest) -> float:
    return max(each.step_s for each in predictions(plan, request.calibrations, gpus_per_vm=request.vm_size))


def line(plan: Plan, request: PlanRequest) -> Line:
    found = line_of(plan, request)
    assert found is not None
    return found


def test_from_that_speed_on_compute_sets_the_pace_and_not_much_below() -> None:
    plan, request = asked()
    found = line(plan, request)
    assert found.needed_bits_per_s is not None
    endless_s = step_s(plan, at(request, 1e15))
    assert step_s(plan, at(request, found.needed_bits_per_s)) <= HARDLY * endless_s * 1.001
    assert step_s(plan, at(request, found.needed_bits_per_s / 1.2)) > HARDLY * endless_s
    assert found.faster == pytest.approx(endless_s / step_s(plan, request), rel=1e-3)
    tenth_s = step_s(plan, at(request, found.found_bits_per_s / 10))
    assert found.at_a_tenth == pytest.approx(tenth_s / step_s(plan, request))


def test_another_line_is_found_and_the_same_one_is_needed() -> None:
    plan, request = asked()
    one, other = line(plan, request), line(plan, at(request, 1e8))
    assert other.found_bits_per_s == pytest.approx(1e8)
    assert one.needed_bits_per_s is not None
    assert other.needed_bits_per_s == pytest.approx(one.needed_bits_per_s, rel=0.2)
    assert other.faster < one.faster <= 1 < one.at_a_tenth


def test_nothing_leaves_one_vm() -> None:
    plan, request = asked()
    assert line_of(plan, request.model_copy(update={"gpus_per_vm": 16})) is None
