"""Whether a run keeps a copy of each stage's state in the memory of another worker. Pure.

It is worth that where each section has one holder, whose loss would send the run back to a checkpoint. A copy is made
during every step, beside the computation, and the next step makes it worthless.
"""

from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.planner.request import PlanRequest

MOST_BUSY = 0.01
"""Of a step, that a copy may keep a link busy. It takes about as much of a core at each end."""


def with_copies(plan: Plan, job: JobFacts, request: PlanRequest, *, measured: bool) -> Plan:
    """The plan with the decision, and with the memory that copies take.

    Args:
        plan: the best one.
        job: what it trains.
        request: that it answers.
        measured: the plan's times were; nominal ones are no reason against copies, which stop by themselves if they
            take too long.
    """
    if plan.replicas > 1 or plan.stages == 1:
        return plan.model_copy(update={"copies": Copies.NONE})
    if job.memory_apart:
        return plan.model_copy(update={"copies": Copies.DEVICE})
    sections = job.model.sections
    state_bytes = [
        sum(sections[index].parameter_bytes + sections[index].optimizer_bytes for index in plan.sections_of(stage))
        for stage in range(plan.stages)
    ]
    sums = [each.trainable_bytes if each.gradient_bytes is None else each.gradient_bytes for each in sections]
    whole_bytes = [
        state_bytes[stage] + sum(sums[index] for index in plan.sections_of(stage)) for stage in range(plan.stages)
    ]
    # Who keeps whose copy is decided with the seats. Sums are sent and received section by section.
    kept_bytes = [max(whole_bytes[:stage] + whole_bytes[stage + 1 :]) + 2 * max(sums) for stage in range(plan.stages)]
    memory_bytes = tuple(own + kept for own, kept in zip(plan.memory_bytes, kept_bytes, strict=True))
    if request.limit_bytes is not None and max(memory_bytes) > request.limit_bytes:
        return plan.model_copy(update={"copies": Copies.MEMORY})
    copy_s = max(state_bytes) / request.calibration.across_vms.link.bytes_per_s
    if measured and copy_s > MOST_BUSY * plan.step_s:
        return plan.model_copy(update={"copies": Copies.TIME})
    return plan.model_copy(update={"copies": Copies.KEPT, "memory_bytes": memory_bytes})
