"""Plans for a request, ranked: for workers of one class or of several, with frozen parameters streamed if that pays."""

from collections.abc import Sequence

from varuna.core.devices import of_count
from varuna.planner.asking.ranking import Ranking
from varuna.planner.asking.request import PlanRequest
from varuna.planner.classes import rank_classes
from varuna.planner.effort import EFFORT, Effort
from varuna.planner.one_class import rank_class
from varuna.planner.unlike import CLEARLY, of_depths
from varuna.schedule.policy import check_policy


def rank_plans(request: PlanRequest, effort: Effort = EFFORT) -> Ranking:
    """Rank every depth, or the requested one, with every m worth trying, or the requested one.

    Frozen parameters are streamed where nothing else fits, or where that is clearly faster at a rate that was measured.

    Args:
        request: with equal workers, of different speed, or of several classes.
        effort: how far walks to neighbours of short plans go.

    Raises:
        UsageError: no such policy, no stages, or an m outside the global batch.
    """
    check_policy(request.policy)
    ranking = _rank(request, effort)
    if not request.may_stream or (ranking.plans and request.calibration.to_device_bytes_per_s is None):
        return ranking
    streaming = _rank(request.model_copy(update={"streams_frozen": True}), effort)
    if not ranking.plans:
        return streaming
    here_s, streaming_s = (_best_score(request, each) for each in (ranking, streaming))
    return streaming if streaming_s < CLEARLY * here_s else ranking


def _rank(request: PlanRequest, effort: Effort = EFFORT) -> Ranking:
    return (rank_classes if request.classes else rank_class)(request, effort)


def _best_score(request: PlanRequest, ranking: Ranking) -> float:
    return min((request.score(plan.workers, plan.step_s) for plan in ranking.plans[:1]), default=float("inf"))


def rank_depths(request: PlanRequest, depths: Sequence[int]) -> Ranking:
    """The plan of pipelines of these depths, deepest first, with the m that is best for the first; or none."""
    at_first = {
        "workers": of_count(request.workers, depths[0] * len(depths)),
        "stages": depths[0],
        "leaves_idle": False,
    }
    ranking = rank_plans(request.model_copy(update=at_first))
    if not ranking.plans:
        return ranking
    first, replicas = ranking.plans[0], len(depths)
    request = request.model_copy(update={"streams_frozen": first.streams_frozen})
    shapes = [request.of_shape(depth, replicas, first.micro_batch) for depth in dict.fromkeys(depths)]
    alike = [_rank(shape).best_of(replicas) for shape in shapes]
    mix = of_depths(depths, [each and each.plan for each in alike], request)
    return ranking.of([] if mix is None else [mix])
