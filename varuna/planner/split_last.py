"""How many of the last backwards to split into I and W: none, P to 1.5 P, or where that is cheap to see all."""

from operator import attrgetter

from varuna.planner.pricing.predict import Simulated, simulated

_MORE = 1.5  # of P, beside P itself, with which plans are compared
_LONG = 16  # micro-batches per stage: beyond, the drain is too small a part to be worth a simulation
_CHEAP = 4_000  # forwards of a replica: so few are simulated in milliseconds
_DEAR = 1.03  # halves that take this much longer than the whole may not pay at all


def with_best_split(given: Simulated) -> Simulated:
    """The plan with the ``split_last`` that simulates best."""
    plan, costs = given.plan, given.prediction.trace.costs
    longest = len(plan.micro_batches_of(0))
    if not plan.split_last or longest > _LONG * plan.stages:
        return given
    best = given
    tries = {min(round(_MORE * plan.stages), longest)}
    if plan.stages * longest <= _CHEAP:  # with all split, stages that keep some and recompute some wait less
        tries |= {0, max(1, plan.stages // 2), longest}
    elif any(stage.input_s + stage.weight_s > _DEAR * stage.backward_s for stage in costs.stages):
        tries.add(0)
    for split in sorted(tries - {plan.split_last}):
        best = min(best, simulated(costs, plan.model_copy(update={"split_last": split})), key=attrgetter("step_s"))
    return best
