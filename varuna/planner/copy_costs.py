"""Time of a step that copies of stages' states and sums of gradients take, by the engine's pace. Pure."""

from typing import NamedTuple

from varuna.core.plan import Copies, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.profile import profile
from varuna.schedule.copy_pace import (
    PROCESSOR_S_PER_BYTE,
    checkpoint_every_s,
    checkpoint_stall_s,
    copying_s,
    state_copying_s,
    sums_pace,
)

SNAPSHOT_BYTES_PER_S = 5e9
"""Rate at which state is copied aside, unless the calibration says so."""


class Rounds(NamedTuple):
    """Copies of a stage's sums of gradients in a step."""

    number: int
    begin_s: float
    """since the step's begin, when the state has been copied, if it is"""
    every_s: float
    """from then to the first, and to each further one"""
    takes_s: float
    """each"""

    def lost_s(self, step_s: float) -> float:
        """Seconds of the step's work that are in no copy, on average over what comes after ``begin_s``."""
        ends_s, sum_s2 = self.begin_s, 0.0
        for number in range(self.number + 1):
            newest_s = self.begin_s + number * self.every_s if number else 0.0  # what was added by then is there
            begins_s = ends_s
            ends_s = step_s if number == self.number else self.begin_s + (number + 1) * self.every_s + self.takes_s
            sum_s2 += (ends_s - newest_s) ** 2 - (begins_s - newest_s) ** 2
        return sum_s2 / 2 / (step_s - self.begin_s) if step_s > self.begin_s else step_s


class Largest(NamedTuple):
    """Bytes of the largest stage that are copied."""

    state_bytes: int
    """none, where other replicas hold it"""
    sums_bytes: int


def copied_rounds(plan: Plan, request: PlanRequest) -> Rounds:
    """Rounds of copies of sums that the largest stage makes in a step that its state's copy, if any, is of."""
    link, sums_bytes = request.calibration.across_vms.link.bytes_per_s, largest_stage(plan, request).sums_bytes
    round_s = copying_s(sums_bytes, link)
    begin_s = min(plan.step_s, memory_checkpoint_s(plan, request)) if plan.copies is Copies.STATE else 0.0
    pace = sums_pace(plan.step_s - begin_s, sums_bytes, round_s)
    return Rounds(pace.rounds, begin_s, pace.every_s, round_s)


def copies_take_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds of a step that copies of state and sums take from a worker whose only processor trains."""
    largest, rounds = largest_stage(plan, request), copied_rounds(plan, request).number
    sums_s = PROCESSOR_S_PER_BYTE * rounds * largest.sums_bytes
    if plan.copies is not Copies.STATE:
        return sums_s
    state_s = _stall_s(plan, request)
    if not request.memory_apart:
        state_s += PROCESSOR_S_PER_BYTE * largest.state_bytes
    return (state_s + sums_s) * plan.step_s / memory_checkpoints_every_s(plan, request)


def memory_checkpoint_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds until a memory checkpoint is complete, in what the messages of the training leave of a link."""
    figures, link = profile(request.calibration, plan.micro_batch), request.calibration.across_vms.link.bytes_per_s
    ends = [pipeline.sections_of(stage).start for pipeline in plan.pipelines for stage in range(1, pipeline.stages)]
    sent_bytes = len(plan.micro_batches_of(0)) * max((figures.boundary_bytes[end - 1] for end in ends), default=0)
    left = 1 - sent_bytes / link / plan.step_s if plan.step_s else 1.0
    if left <= 0:
        return float("inf")
    return state_copying_s(largest_stage(plan, request).state_bytes, link * left, _pays_every_s(plan, request))


def memory_checkpoints_every_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds between memory checkpoints."""
    return max(_pays_every_s(plan, request), memory_checkpoint_s(plan, request))


def _pays_every_s(plan: Plan, request: PlanRequest) -> float:
    every_s = checkpoint_every_s(
        largest_stage(plan, request).state_bytes,
        _stall_s(plan, request),
        on_device=request.memory_apart,
        losses_per_hour=request.losses_per_hour,
    )
    return max(every_s, plan.step_s)


def _stall_s(plan: Plan, request: PlanRequest) -> float:
    per_s = request.calibration.snapshot_bytes_per_s or SNAPSHOT_BYTES_PER_S
    aside_s = largest_stage(plan, request).state_bytes / per_s
    return checkpoint_stall_s(aside_s, plan.step_s, on_device=request.memory_apart)


def largest_stage(plan: Plan, request: PlanRequest) -> Largest:
    """Bytes of the largest stage, if copies were made as far as the number of replicas asks for them."""
    figures = profile(request.calibration, plan.micro_batch)
    spans = [slot.sections for slot in plan.slots]
    state_bytes = int(max(map(figures.state_bytes.over, spans))) if plan.replicas == 1 else 0
    return Largest(state_bytes, int(max(map(figures.gradient_bytes.over, spans))))
