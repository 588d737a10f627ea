"""Pipelines of one class beside some that run on several: a scarce class works with a part of the others. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import Simulated
from varuna.planner.unlike.parts import Rank, Span, ranked_alone, rate_of, together

_MOST_ALONE = 3
"""Pipelines of a class that are kept for themselves, at most, as is tried."""


def with_pipelines_beside(
    request: PlanRequest, alone: Mapping[str, Plan], spanned: Sequence[Simulated], rank: Rank, span: Span
) -> list[Simulated]:
    """Plans with pipelines on several classes, and others on one.

    Those have what pipelines on several leave idle, or one, two or three pipelines of a class, cut as when it is alone.

    Args:
        request: with the classes.
        alone: the best plan of each class that holds a pipeline alone.
        spanned: the best plans whose pipelines are all on several classes.
        rank: ranks plans for workers of one class.
        span: finds pipelines that run on several.
    """
    tried = [*spanned[:1], *_of_fewer(request, alone, span)]
    found = [_beside(request, simulated.plan, alone, rank) for simulated in tried]
    return [simulated for simulated in found if simulated is not None]


def _of_fewer(request: PlanRequest, alone: Mapping[str, Plan], span: Span) -> Iterator[Simulated]:
    """Pipelines on several classes that leave some pipelines to one."""
    for kept, plan in alone.items():
        for number in range(1, _MOST_ALONE + 1):
            left = request.count_of(kept) - number * plan.stages
            if left < 1:
                break
            yield from span(request.with_count(kept, left), [plan.micro_batch])[:1]


def _beside(request: PlanRequest, spanned: Plan, alone: Mapping[str, Plan], rank: Rank) -> Simulated | None:
    """The plan, with pipelines of one class of all workers that it leaves idle; None if there can be none."""
    parts, rate = [spanned], rate_of(spanned)
    for name, plan in alone.items():
        left = request.count_of(name) - spanned.classes.get(name, 0)
        if not left:
            continue
        expected = rate_of(plan) * left / plan.workers
        batch = max(spanned.micro_batch, round(request.global_batch * expected / (rate + expected)))
        asked = {"global_batch": batch, "micro_batch": spanned.micro_batch, "lowers_micro_batch": False, "mixes": False}
        parts += ranked_alone(request.with_count(name, left), name, rank, **asked).plans[:1]
    return together(request, parts) if len(parts) > 1 else None
