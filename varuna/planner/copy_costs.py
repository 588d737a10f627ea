"""What copies of stages' states and sums of gradients take of a step, by the engine's pace. Pure."""

from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.pricing.profile import profile
from varuna.planner.request import PlanRequest
from varuna.schedule.copy_pace import PROCESSOR_S_PER_BYTE, copying_s, sums_pause_s


class Rounds(NamedTuple):
    """Copies of a stage's sums of gradients in a step."""

    number: float
    first_s: float
    """since the step's begin"""
    every_s: float


class Largest(NamedTuple):
    """Bytes of the largest stage."""

    state_bytes: int
    sums_bytes: int


def copied_rounds(plan: Plan, request: PlanRequest) -> Rounds:
    """Rounds of copies of sums that the largest stage makes in a step."""
    link, largest = request.calibration.across_vms.link.bytes_per_s, largest_stage(plan, request)
    round_s = copying_s(largest.sums_bytes, link)
    first_s = copying_s(largest.state_bytes, link) + sums_pause_s(0.0, 0) + round_s
    every_s = round_s + sums_pause_s(round_s, largest.sums_bytes)
    return Rounds(max(0.0, 1 + (plan.step_s - first_s) // every_s), first_s, every_s)


def copies_take_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds of a step that copies of state and sums take from a worker whose only processor trains."""
    largest = largest_stage(plan, request)
    rounds = copied_rounds(plan, request).number
    return PROCESSOR_S_PER_BYTE * (largest.state_bytes + rounds * largest.sums_bytes)


def largest_stage(plan: Plan, request: PlanRequest) -> Largest:
    """Bytes of the largest stage."""
    figures = profile(request.calibration, plan.micro_batch)
    spans = [plan.sections_of(stage) for stage in range(plan.stages)]
    return Largest(int(max(map(figures.state_bytes.over, spans))), int(max(map(figures.gradient_bytes.over, spans))))
