"""The order of a plan's actions: how many of the last backwards are split, and whether a stage runs empty."""

from operator import attrgetter

from varuna.core.plan import Plan
from varuna.planner.effort import EFFORT
from varuna.planner.pricing.predict import Simulated, simulated
from varuna.simulator.costs import PipelineCosts


def with_best_order(given: Simulated) -> Simulated:
    """The plan with the ``split_last`` and the ``empties`` that simulate best."""
    plan, costs = given.plan, given.prediction.trace.costs
    best = given
    for split in sorted(_splits(plan, costs)):
        for empties in (False, True) if _may_empty(plan, costs) else (False,):
            if (split, empties) != (plan.first.split_last, plan.first.empties):
                tried = simulated(costs, plan.with_each_pipeline(split_last=split, empties=empties))
                best = min(best, tried, key=attrgetter("step_s"))
    return best


def _splits(plan: Plan, costs: PipelineCosts) -> set[int]:
    """Numbers of split backwards to try: none, P to 1.5 P, or where that is cheap to see all."""
    given, longest = plan.first.split_last, len(plan.micro_batches_of(0))
    if not given or longest > EFFORT.long * plan.stages:
        return {given}
    tries = {given, min(round(EFFORT.more_split * plan.stages), longest)}
    if plan.stages * longest <= EFFORT.cheap_forwards:
        # With all split, stages that keep some and recompute some wait less.
        tries |= {0, max(1, plan.stages // 2), longest}
    elif any(stage.input_s + stage.weight_s > EFFORT.dear_halves * stage.backward_s for stage in costs.stages):
        tries.add(0)
    return tries


def _may_empty(plan: Plan, costs: PipelineCosts) -> bool:
    """Return whether the stage before the last has R's, and the policy may spare them."""
    return plan.policy == "adaptive" and plan.stages > 1 and not costs.stages[-2].keeps_all
