"""The number of last backwards to split into I and W: none, P to 1.5 P, or where that is cheap to see all."""

from operator import attrgetter

from varuna.planner.effort import EFFORT
from varuna.planner.pricing.predict import Simulated, simulated


def with_best_split(given: Simulated) -> Simulated:
    """The plan with the ``split_last`` that simulates best."""
    plan, costs = given.plan, given.prediction.trace.costs
    longest = len(plan.micro_batches_of(0))
    if not plan.first.split_last or longest > EFFORT.long * plan.stages:
        return given
    best = given
    tries = {min(round(EFFORT.more_split * plan.stages), longest)}
    if plan.stages * longest <= EFFORT.cheap_forwards:
        # With all split, stages that keep some and recompute some wait less.
        tries |= {0, max(1, plan.stages // 2), longest}
    elif any(stage.input_s + stage.weight_s > EFFORT.dear_halves * stage.backward_s for stage in costs.stages):
        tries.add(0)
    for split in sorted(tries - {plan.first.split_last}):
        best = min(best, simulated(costs, plan.each(split_last=split)), key=attrgetter("step_s"))
    return best
