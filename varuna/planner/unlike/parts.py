"""Parts of a plan for workers of several classes: plans of pipelines alone, which are put together. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from varuna.core.plan import Pipeline, Plan
from varuna.planner.asking.ranking import Ranking
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import Simulated
from varuna.planner.unlike.dealt import dealt

Rank = Callable[[PlanRequest], Ranking]
Span = Callable[[PlanRequest, Sequence[int]], list[Simulated]]
"""From a request and values of m, which are none if nothing fits otherwise"""
DEPTHS = 3
"""Plans of a class that are tried beside those of the others."""


def ranked_alone(request: PlanRequest, name: str, rank: Rank, **changes: object) -> Ranking:
    """The ranking of one class; its plans say that they are for it."""
    asked = request.of_class(name)
    ranking = rank(asked.model_copy(update={"wanted": max(asked.wanted, DEPTHS), **changes}))
    return replace(ranking, plans=tuple(plan.with_each_pipeline(device_class=name) for plan in ranking.plans))


def rate_of(plan: Plan) -> float:
    """Examples per second."""
    return plan.global_batch / plan.step_s if plan.step_s else float("inf")


def together(request: PlanRequest, parts: Sequence[Plan], **how: int) -> Simulated | None:
    """One plan of the pipelines of all parts, the fastest pipelines first; None: there are too few micro-batches."""
    kinds = [kind for part in parts for kind in _kinds(part)]
    kinds.sort(key=lambda kind: -kind.pace)
    micro_batch = parts[0].micro_batch
    if sum(kind.replicas for kind in kinds) > -(-request.global_batch // micro_batch):
        return None
    fastest = kinds[0].pace
    scaled = [kind.model_copy(update={"pace": kind.pace / fastest}) for kind in kinds]
    return dealt(scaled, parts[0].model_copy(update={"global_batch": request.global_batch}), request, **how)


def _kinds(part: Plan) -> Iterator[Pipeline]:
    """Pipelines of a part, with the examples per second of one of full speed as their pace."""
    each = rate_of(part) / sum(map(part.rate_of, range(part.replicas)))
    for replicas, pipeline in part.kinds:
        pace = each * part.rate_of(replicas.start) / part.speed_of(replicas.start)
        yield pipeline.model_copy(update={"pace": pace})
