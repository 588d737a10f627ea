"""The sweep: every depth P that the workers allow, every m worth trying, ranked (paper §"Parametrized Simulation")."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from varuna.core.devices import of_count
from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.planner.asking.ranking import PrunedPlan, Ranking, Rejection
from varuna.planner.asking.request import PlanRequest
from varuna.planner.build import Builder, OutOfMemory
from varuna.planner.effort import EFFORT, Effort
from varuna.planner.estimate import Depth, Guesser
from varuna.planner.micro_batch import candidate_sizes
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import Simulated
from varuna.planner.pricing.profile import profile
from varuna.planner.search import search
from varuna.planner.spanning import spanning
from varuna.planner.unlike.classes import by_class
from varuna.planner.unlike.left_over import CLEARLY, may_mix, of_depths, without_idle
from varuna.planner.unlike.speeds import with_speeds
from varuna.schedule.policy import check_policy

_WEIGHED = 8
"""Depths that are looked at for workers of different speed."""
_MIXED = 4
"""Plans for whose numbers of pipelines two depths are looked at."""


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


def _best_score(request: PlanRequest, ranking: Ranking) -> float:
    return min((request.score(plan.workers, plan.step_s) for plan in ranking.plans[:1]), default=float("inf"))


def _rank(request: PlanRequest, effort: Effort) -> Ranking:
    if request.classes:
        return by_class(request, partial(_rank, effort=effort.shared_by(len(request.classes))), spanning)
    depths, rejected = _depths(request)
    if not depths:
        return Ranking(plans=(), predictions=(), outpaced=(), rejected=rejected)
    asked = request.model_copy(update={"wanted": max(request.wanted, _WEIGHED)}) if request.are_unequal else request
    for sizes in candidate_sizes(request):
        ranking = _sweep(asked, depths, sizes, effort)
        if ranking.plans:
            break
    return _by_speed(ranking, request) if request.are_unequal else _nobody_idle(ranking, request)


def _by_speed(ranking: Ranking, request: PlanRequest) -> Ranking:
    """The plans with replicas of different speed, best first."""
    ranked = _best_first(request, [with_speeds(plan, request) for plan in ranking.plans[:_WEIGHED]])
    return replace(
        ranking,
        plans=tuple(each.plan for each in ranked),
        predictions=tuple(each.prediction for each in ranked),
        outpaced=(),  # their bounds are for equal workers
    )


def _nobody_idle(ranking: Ranking, request: PlanRequest) -> Ranking:
    """The ranking with a plan more, in which all workers have a seat, if that makes steps clearly shorter.

    Pipelines of two depths are looked at for as many pipelines as the best plans have: what is best for 48 of 51
    workers is a good beginning for all of them.
    """
    if not may_mix(request) or not ranking.plans:
        return ranking
    found = dict(zip(ranking.plans, ranking.predictions, strict=True))
    least = CLEARLY * request.score(ranking.plans[0].workers, ranking.plans[0].step_s)
    numbers = {plan.replicas: plan for plan in reversed(ranking.plans[:_MIXED])}
    for plan in numbers.values():
        at_best_s = plan.step_s * plan.workers / request.count
        if request.score(request.count, at_best_s) < least:
            mix = without_idle(plan, request, partial(_at_depth, request))
            if mix is not None and request.score(mix.plan.workers, mix.step_s) < least:
                found[mix.plan] = mix.prediction
    ranked = _best_first(request, [Simulated(*each) for each in found.items()])
    return replace(
        ranking,
        plans=tuple(each.plan for each in ranked),
        predictions=tuple(each.prediction for each in ranked),
    )


def equal_pipelines(request: PlanRequest, stages: int, replicas: int, micro_batch: int) -> Simulated | None:
    """The best equal pipelines, so many and so deep, by the fastest workers; None: they do not fit."""
    fixed = {
        "workers": of_count(request.workers, stages * replicas),
        "stages": stages,
        "micro_batch": micro_batch,
        "lowers_micro_batch": False,
        "leaves_idle": False,
        "wanted": 1,
    }
    ranking = _rank(request.model_copy(update=fixed), EFFORT)
    found = map(Simulated, ranking.plans, ranking.predictions)
    return next((each for each in found if each.plan.replicas == replicas), None)


def _at_depth(request: PlanRequest, stages: int, replicas: int, micro_batch: int) -> Plan | None:
    found = equal_pipelines(request, stages, replicas, micro_batch)
    return None if found is None else found.plan


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
    request = request.model_copy(update={"streams_frozen": ranking.plans[0].streams_frozen})
    mix = of_depths(depths, ranking.plans[0].micro_batch, request, partial(_at_depth, request))
    found = [] if mix is None else [mix]
    return replace(
        ranking, plans=tuple(each.plan for each in found), predictions=tuple(each.prediction for each in found)
    )


def _sweep(request: PlanRequest, depths: range, sizes: tuple[int, ...], effort: Effort) -> Ranking:
    builders: dict[int, Builder] = {}
    guessers: dict[int, Guesser] = {}
    possible: list[Depth] = []
    misfits: list[OutOfMemory] = []
    for m in sizes:
        figures = profile(request.calibration, m, streams_frozen=request.streams_frozen)
        builder = builders[m] = Builder(request, figures)
        guesser = guessers[m] = Guesser(request, builder.profile, may_keep=builder.may_keep)
        for stages in depths:
            if guesser.fits(stages):
                possible.append(Depth(stages, m))
            elif m == sizes[0]:  # the closest miss
                misfits.append(builder.misfit(guesser.guesses(stages)[0].shape))
    found = search(request, builders, guessers, possible, effort)
    shown, rest = found.best[: request.wanted], found.best[request.wanted :]
    ordered = [*map(with_best_order, shown), *rest]
    promised = [each._replace(plan=builders[each.plan.micro_batch].promised(each.plan)) for each in ordered]
    ranked = _best_first(request, promised)
    fitting = {best.plan.stages for best in ranked} | {built.shape.stages for built in found.bounded}
    shallow = _shallow(builders, guessers, found.guessed, min(fitting, default=0))
    unseen = {depth.stages for depth in found.guessed} - {misfit.shape.stages for misfit in shallow}
    return Ranking(
        plans=tuple(best.plan for best in ranked),
        predictions=tuple(best.prediction for best in ranked),
        outpaced=tuple(PrunedPlan(**built.shape._asdict(), at_least_s=built.bound_s) for built in found.bounded),
        rejected=_rejections([*misfits, *found.misfits, *shallow], fitting | unseen),
    )


def _shallow(
    builders: dict[int, Builder], guessers: dict[int, Guesser], guessed: frozenset[Depth], deepest: int
) -> list[OutOfMemory]:
    """Rejections of depths below all that fit: the search skipped them, but users ask why they are missing."""
    smallest = min(builders)
    found: list[OutOfMemory] = []
    for stages in sorted(depth.stages for depth in guessed if depth.micro_batch == smallest):
        for guess in guessers[smallest].guesses(stages) if stages < deepest else ():
            outcome = builders[smallest].first(guess)
            if not isinstance(outcome, OutOfMemory):
                return found
            found.append(outcome)
    return found


def _depths(request: PlanRequest) -> tuple[range, tuple[Rejection, ...]]:
    """Depths to try; or an error that says why the requested one is impossible."""
    stages, sections, workers = request.stages, request.calibration.section_count, request.count
    if stages is None:
        return range(1, min(workers, sections) + 1), ()
    if stages < 1:
        raise UsageError(
            f"stages={stages} was requested, but a pipeline has at least 1 stage. Raise --stages, or leave it out."
        )
    reason = None
    if stages > sections:
        reason = f"P={stages} was requested, but the model has {sections} sections"
    elif stages > workers:
        found = "is 1 worker" if workers == 1 else f"are {workers} workers"
        reason = f"P={stages} was requested, but there {found}"
    if reason is None:
        return range(stages, stages + 1), ()
    return range(0), (Rejection(stages=stages, replicas=0, reason=reason),)


def _rejections(misfits: list[OutOfMemory], possible: set[int]) -> tuple[Rejection, ...]:
    """For each depth that fits with no m, its closest miss."""
    closest: dict[int, OutOfMemory] = {}
    for misfit in misfits:
        stages = misfit.shape.stages
        if stages not in possible and (stages not in closest or misfit.missing_bytes < closest[stages].missing_bytes):
            closest[stages] = misfit
    return tuple(
        Rejection(
            stages=stages,
            replicas=misfit.shape.replicas,
            micro_batch=misfit.shape.micro_batch,
            reason=misfit.reason,
            missing_bytes=misfit.missing_bytes,
        )
        for stages, misfit in sorted(closest.items())
    )


def _best_first(request: PlanRequest, found: list[Simulated]) -> list[Simulated]:
    """Sort by score; of equal plans the one with fewer stages comes first, which loses less per failure."""
    return sorted(found, key=lambda best: (request.score(best.plan.workers, best.step_s), best.plan.stages))
