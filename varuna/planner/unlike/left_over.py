"""Pipelines of two depths, so that no worker is left over. Each is cut as is best for equal pipelines of its depth.

With the same number of pipelines, some get one stage more, until every worker has a seat. They run as many
micro-batches more as they are faster.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import Simulated
from varuna.planner.unlike.dealt import dealt

CLEARLY = 0.99
"""So much shorter must a step be for pipelines that are not alike: the next plan has less in common with them."""


AtDepth = Callable[[int, int, int], Plan | None]


def may_mix(request: PlanRequest) -> bool:
    """Whether pipelines may be of different depth.

    Not where the user has fixed one; where replicas of a stage share out their state; or where nothing was measured:
    nominal figures do not know what a stage more is worth.
    """
    is_free = request.mixes and request.stages is None and not request.are_unequal
    return is_free and request.leaves_idle and not request.calibration.optimizer.sharded


def without_idle(plan: Plan, request: PlanRequest, at_depth: AtDepth) -> Simulated | None:
    """As many pipelines as a plan has, some one stage deeper, so that every worker has a seat; None: it cannot be.

    Args:
        plan: of equal pipelines.
        request: with more workers than it uses.
        at_depth: see ``of_depths``.
    """
    depth, deeper = divmod(request.count, plan.replicas)
    if plan.replicas == 1 or not deeper or not 1 <= depth < plan.sections:
        return None
    return of_depths([depth + 1] * deeper + [depth] * (plan.replicas - deeper), plan.micro_batch, request, at_depth)


def of_depths(depths: Sequence[int], micro_batch: int, request: PlanRequest, at_depth: AtDepth) -> Simulated | None:
    """A plan of pipelines of these depths, whose micro-batches are dealt so that they end together, as whole ones can.

    Args:
        depths: descending.
        micro_batch: m.
        request: which workers, and what a step is.
        at_depth: gives the best plan of equal pipelines by depth, number and m; None: there is none.
    """
    numbers = Counter(depths)
    alike = [at_depth(depth, len(depths), micro_batch) for depth in numbers]
    plans = [plan for plan in alike if plan is not None]
    if len(plans) < len(numbers):
        return None
    kinds = [
        plan.first.model_copy(update={"replicas": number, "pace": depth / depths[0], "speeds": ()})
        for plan, (depth, number) in zip(plans, numbers.items(), strict=True)
    ]
    return dealt(kinds, plans[0], request)
