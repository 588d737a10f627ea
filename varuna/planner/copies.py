"""Whether a run keeps a copy of each stage's state in the memory of another worker. Pure.

It is worth that where each section has one holder, whose loss would send the run back to a checkpoint. A copy is made
during every step, beside the computation, and the next step makes it worthless.
"""

from varuna.core.plan import Copies, Plan
from varuna.planner.copy_costs import largest_stage
from varuna.planner.goodput import expected
from varuna.planner.pricing.profile import profile
from varuna.planner.request import PlanRequest
from varuna.schedule.copy_pace import LONGEST, copying_s

MOST_BUSY = 0.01
"""Of a step, that a copy may keep a link busy, while nothing is known of losses. It takes about as much of a core at
each end."""


def with_copies(plan: Plan, request: PlanRequest, *, measured: bool, apart: bool = False) -> Plan:
    """The plan with the decision, and with the memory that copies take.

    Args:
        plan: the best one.
        request: that it answers.
        measured: the plan's times were; nominal ones are no reason against copies, which stop by themselves if they
            take too long.
        apart: copies would lie in the memory of hosts, beside that of devices.
    """
    if plan.replicas > 1 or plan.stages == 1:
        return plan.model_copy(update={"copies": Copies.NONE})
    if not request.keeps_sums:
        return plan.model_copy(update={"copies": Copies.DEVICE})
    figures = profile(request.calibration, plan.micro_batch)
    spans = [plan.sections_of(stage) for stage in range(plan.stages)]
    whole_bytes = [int(figures.state_bytes.over(span) + figures.gradient_bytes.over(span)) for span in spans]
    most_bytes = int(max(figures.gradient_bytes.values))
    # Who keeps whose copy is decided with the seats. Sums are sent and received section by section.
    kept_bytes = [max(whole_bytes[:stage] + whole_bytes[stage + 1 :]) + 2 * most_bytes for stage in range(plan.stages)]
    own_bytes, limit_bytes = plan.memory_bytes, request.limit_bytes
    if apart:
        own_bytes, limit_bytes = plan.host_bytes or (0,) * plan.stages, request.host_limit_bytes
    all_bytes = tuple(own + kept for own, kept in zip(own_bytes, kept_bytes, strict=True))
    if limit_bytes is not None and max(all_bytes) > limit_bytes:
        return plan.model_copy(update={"copies": Copies.MEMORY})
    if measured and not are_worth_it(plan, request):
        return plan.model_copy(update={"copies": Copies.TIME})
    return plan.model_copy(update={"copies": Copies.KEPT, "host_bytes" if apart else "memory_bytes": all_bytes})


def are_worth_it(plan: Plan, request: PlanRequest) -> bool:
    """Whether copies of a plan with one replica cost less than they save.

    Without a rate of losses, they may keep a link busy for a small part of a step; with one they are weighed.
    """
    link, state_bytes = request.calibration.across_vms.link.bytes_per_s, largest_stage(plan, request).state_bytes
    if not request.losses_per_hour:
        return state_bytes / link <= MOST_BUSY * plan.step_s
    if copying_s(state_bytes, link) > LONGEST * plan.step_s:
        return False  # ranks would make them less and less often
    kept, without = (
        expected(plan.model_copy(update={"copies": copies}), request) for copies in (Copies.KEPT, Copies.NONE)
    )
    return kept.examples_per_s > without.examples_per_s
