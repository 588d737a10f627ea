"""Pipelines of workers of different speed. Depths and cuts are those that are best for equal workers.

Workers of a class are taken in the order of their speed, and the number of pipelines is tried again: a slow one that
would end last is not worth having.
"""

from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.predict import Simulated, predictions, simulated
from varuna.planner.pricing.profile import profile


def with_speeds(plan: Plan, request: PlanRequest) -> Simulated:
    """The plan with as many replicas as make it best, each with its speed."""
    figures = profile(request.calibration, plan.micro_batch, streams_frozen=plan.streams_frozen)
    tried = [
        simulated(pipeline_costs(figures, each, gpus_per_vm=request.vm_size), each) for each in _tries(plan, request)
    ]
    return min(tried, key=lambda each: request.score(each.plan.workers, each.step_s))


def of_these_workers(found: Simulated, request: PlanRequest) -> Simulated:
    """A plan that was made for workers of full speed, as those that there are run it."""
    plan = found.plan.at_speeds(request.workers)
    if not plan.speeds:
        return found
    longest = max(predictions(plan, request.calibrations, gpus_per_vm=request.gpus_per_vm), key=attrgetter("step_s"))
    return Simulated(plan.model_copy(update={"step_s": longest.step_s}), longest)


def _tries(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """One replica fewer or more changes little, unless the next one is slower."""

    def of(count: int) -> Plan:
        return plan.with_each_pipeline(replicas=count).model_copy(update={"step_s": 0.0}).at_speeds(request.workers)

    most = min(request.count // plan.stages, plan.micro_batches)
    paces = pairwise(of(most).speeds)
    counts = {plan.replicas, most} | {count for count, (this, next_) in enumerate(paces, 1) if this > next_}
    if request.calibration.optimizer.sharded:  # fewer replicas would hold more state each
        counts = {count for count in counts if count >= plan.replicas}
    if not request.leaves_idle:
        counts = {most}
    yield from map(of, sorted(counts))
