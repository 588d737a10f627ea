"""The cost of a worker's loss under a plan, and the examples per second that are left at a rate of losses. Pure.

A loss is noticed, groups are formed, state moves, and what nobody has of the step runs again. How much that is depends
on the plan: with D replicas it is about the lost one's share, with copies of its sums what came after the newest of
them, with one replica and no copies the steps since the newest checkpoint.
"""

from typing import NamedTuple

from varuna.core.plan import Copies, Plan
from varuna.core.saved import paying_every_s
from varuna.planner.asking.request import PlanRequest
from varuna.planner.copy_costs import (
    SNAPSHOT_BYTES_PER_S,
    copied_rounds,
    copies_take_s,
    memory_checkpoint_s,
    memory_checkpoints_every_s,
)
from varuna.planner.pricing.profile import profile

NOTICED_S = 6.0
"""Until a machine that vanished without a word counts as lost: a lease."""
REGROUPED_S = 2.5
"""From then until the new groups are there; ``benchmarks.recovery`` shows less on one machine."""


class Expected(NamedTuple):
    """The worth of a plan at a rate of losses; seconds are of training."""

    step_s: float
    """of a step, with what copies take of it"""
    loss_s: float
    """that a loss of one of its workers costs"""
    losses_per_hour: float
    """of its workers: what takes an idle one costs nothing"""
    examples_per_s: float
    """that are left"""

    @property
    def share(self) -> float:
        """Of the time that is not lost to losses and copies."""
        return 1 / (1 + self.losses_per_hour / 3600 * self.loss_s)


def expected(plan: Plan, request: PlanRequest) -> Expected:
    """Compute a plan's worth at the request's rate of losses."""
    step_s = plan.step_s + (copies_take_s(plan, request) if plan.copies.are_made else 0.0)
    rate = request.losses_per_hour * min(1.0, plan.workers / request.count)
    loss_s = loss_cost_s(plan, request)
    each_s = step_s * (1 + rate / 3600 * loss_s)
    return Expected(step_s, loss_s, rate, plan.global_batch / each_s if each_s else float("inf"))


def loss_cost_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds of training that the loss of a worker costs, on average over the moments of a step."""
    figures = profile(request.calibration, plan.micro_batch)
    state_bytes = max(figures.state_bytes.over(slot.sections) for slot in plan.slots)
    link = request.calibration.across_vms.link.bytes_per_s
    # Parameters move where the number of stages changes, as it mostly does if no spare is there. Optimizer state
    # follows while the next step runs.
    moved_bytes = max(figures.parameter_bytes.over(slot.sections) for slot in plan.slots) if plan.is_cut else 0
    base_s = NOTICED_S + REGROUPED_S + moved_bytes / link
    return base_s + _again_s(plan, request, state_bytes, link)


def _again_s(plan: Plan, request: PlanRequest, state_bytes: float, link: float) -> float:
    """Seconds of the step, or of steps, that run again."""
    step_s, fill = plan.step_s, max(plan.depths) - 1
    flight_s = step_s * fill / (len(plan.micro_batches_of(0)) + fill)
    if plan.replicas > 1:
        since_s = copied_rounds(plan, request).lost_s(step_s) if plan.copies is Copies.SUMS else step_s / 2
        return since_s / plan.replicas + flight_s
    if plan.copies is not Copies.STATE:
        return step_s / 2 + _checkpoint_age_s(plan, request, state_bytes)
    every_s, arrives_s = memory_checkpoints_every_s(plan, request), memory_checkpoint_s(plan, request)
    if every_s > step_s:
        return arrives_s + every_s / 2
    bare = arrives_s / step_s if step_s else 0.0  # until it has arrived, the one before counts
    lost_s = copied_rounds(plan, request).lost_s(step_s) + flight_s
    return bare * (step_s + arrives_s / 2) + (1 - bare) * lost_s


def _checkpoint_age_s(plan: Plan, request: PlanRequest, state_bytes: float) -> float:
    """Seconds of work before the step in flight that no checkpoint has: half of Young's interval, in whole steps."""
    stall_s = state_bytes / plan.replicas / (request.calibration.snapshot_bytes_per_s or SNAPSHOT_BYTES_PER_S)
    return max(0.0, paying_every_s(stall_s, request.losses_per_hour, plan) - plan.step_s) / 2
