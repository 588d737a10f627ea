"""Whether a run keeps copies of what a stage has in the memory of another worker. Pure.

Of its state, where each section has one holder, whose loss would send the run back to a checkpoint: all workers make a
memory checkpoint every few steps, or in each long one, and go back to it. Of its sums of gradients in long steps in any
case: what a worker has added to them is nowhere else until the step's end.
"""

from collections.abc import Sequence
from itertools import islice

from varuna.core.plan import Copies, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.copy_costs import copied_rounds, largest_stage, memory_checkpoint_s
from varuna.planner.goodput import expected
from varuna.planner.pricing.profile import profile

LATEST_S = 60.0
"""A memory checkpoint that comes later to its keeper, and after its step, is not worth making: those in a store are
about as old."""
MOST_BUSY = 0.01
"""Of a step, that copies of sums may keep a link busy, while nothing is known of losses. They take about as much of a
core at each end."""


def with_copies(plan: Plan, request: PlanRequest, *, measured: bool) -> Plan:
    """The plan with the decision, and with the memory that copies take.

    Args:
        plan: the best one.
        request: that it answers.
        measured: the plan's times were; nominal ones are no reason against copies, which stop by themselves if they
            take too long.
    """
    if plan.workers == 1:
        return plan.model_copy(update={"copies": Copies.NONE})
    copied = plan.model_copy(update={"copies": Copies.STATE if plan.replicas == 1 else Copies.SUMS})
    promised = _with_memory(copied, _kept_bytes(copied, request), request)
    if not _fits(promised, request):
        return plan.model_copy(update={"copies": Copies.MEMORY})
    if measured and not are_worth_it(copied, request):
        return plan.model_copy(update={"copies": Copies.TIME})
    return promised


def _kept_bytes(plan: Plan, request: PlanRequest) -> list[int]:
    """By slot of the plan: bytes that copies take there, at most."""
    figures = profile(request.calibration, plan.micro_batch)
    spans = [slot.sections for slot in plan.slots]
    most_bytes = int(max(figures.gradient_bytes.values))  # sums are sent and received section by section
    sums_bytes = [int(figures.gradient_bytes.over(span)) for span in spans]
    # Who keeps whose is decided with the seats.
    kept_bytes = [max(sums_bytes) + 2 * most_bytes if copied_rounds(plan, request).number else 0] * len(spans)
    if plan.copies is Copies.SUMS:
        return kept_bytes
    own_bytes = [int(figures.state_bytes.over(span)) for span in spans]  # twice, until the next one is complete
    others_bytes = [max(own_bytes[:stage] + own_bytes[stage + 1 :]) for stage in range(len(spans))]
    return [2 * (own + other) + kept for own, other, kept in zip(own_bytes, others_bytes, kept_bytes, strict=True)]


def _fits(plan: Plan, request: PlanRequest) -> bool:
    """Return whether every worker has the memory, of its host or the device's, that is promised."""
    apart = request.memory_apart
    for pipeline in plan.pipelines:
        for stage, needed_bytes in enumerate(pipeline.host_bytes if apart else pipeline.memory_bytes):
            asked = request.for_class(pipeline.class_of(stage))
            limit_bytes = asked.host_limit_bytes if apart else asked.limit_bytes
            if limit_bytes is not None and needed_bytes > limit_bytes:
                return False
    return True


def _with_memory(plan: Plan, kept_bytes: Sequence[int], request: PlanRequest) -> Plan:
    """The plan with what copies take by slot, in the memory where they are."""
    name, left = "host_bytes" if request.memory_apart else "memory_bytes", iter(kept_bytes)

    def more(own_bytes: tuple[int, ...], stages: int) -> tuple[int, ...]:
        return tuple(own + kept for own, kept in zip(own_bytes or (0,) * stages, islice(left, stages), strict=True))

    pipelines = tuple(each.model_copy(update={name: more(getattr(each, name), each.stages)}) for each in plan.pipelines)
    return plan.model_copy(update={"pipelines": pipelines})


def are_worth_it(plan: Plan, request: PlanRequest) -> bool:
    """Return whether the copies of a plan cost less than they save.

    Without a rate of losses, those of sums may keep a link busy for a small part of a step; with one they are weighed.
    Memory checkpoints are made as rarely as their price asks for: without others in a store they are always worth it.
    """
    if plan.copies is Copies.STATE and not (request.losses_per_hour and request.saves):
        return memory_checkpoint_s(plan, request) <= max(LATEST_S, plan.step_s)
    rounds = copied_rounds(plan, request).number
    if plan.copies is Copies.SUMS and not rounds:
        return False  # a step is over before
    if not request.losses_per_hour:
        link = request.calibration.across_vms.link.bytes_per_s
        return rounds * largest_stage(plan, request).sums_bytes / link <= MOST_BUSY * plan.step_s
    without = expected(plan.model_copy(update={"copies": Copies.NONE}), request)
    return expected(plan, request).examples_per_s > without.examples_per_s
