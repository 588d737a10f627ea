"""Plans for workers of one class: every depth P, every m worth trying, ranked (paper §"Parametrized Simulation").

Equal workers get equal pipelines, or pipelines of two depths if some worker would be left over; where some are slower,
each pipeline runs as much as it can.
"""

from collections.abc import Sequence
from dataclasses import replace

from varuna.core.errors import UsageError
from varuna.planner.asking.ranking import PrunedPlan, Ranking, Rejection
from varuna.planner.asking.request import PlanRequest
from varuna.planner.build import Builder, OutOfMemory
from varuna.planner.effort import EFFORT, Effort
from varuna.planner.estimate import Depth
from varuna.planner.micro_batch import candidate_sizes
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import Simulated
from varuna.planner.search import Search
from varuna.planner.unlike import CLEARLY, of_depths, with_speeds

_WEIGHED = 8
"""Depths that are looked at for workers of different speed."""
_MIXED = 4
"""Plans for whose numbers of pipelines two depths are looked at."""


def rank_class(request: PlanRequest, effort: Effort = EFFORT) -> Ranking:
    """Rank every depth, or the requested one, with every m worth trying, or the requested one.

    Args:
        request: with workers of one class.
        effort: how far walks to neighbours of short plans go.

    Raises:
        UsageError: no stages, or an m outside the global batch.
    """
    depths, rejected = _depths(request)
    if not depths:
        return Ranking(rejected=rejected)
    asked = request.model_copy(update={"wanted": max(request.wanted, _WEIGHED)}) if request.are_unequal else request
    for sizes in candidate_sizes(request):
        ranking = _sweep(asked, depths, sizes, effort)
        if ranking.plans:
            break
    if not request.are_unequal:
        return _with_all_seated(ranking, request)
    dealt = [with_speeds(plan, request) for plan in ranking.plans[:_WEIGHED]]
    return replace(ranking.of(_best_first(request, dealt)), outpaced=())  # bounds are for equal workers


def equal_pipelines(request: PlanRequest, stages: int, replicas: int, micro_batch: int) -> Simulated | None:
    """The best equal pipelines, so many and so deep, by the fastest workers of a class; None: they do not fit."""
    return rank_class(request.of_shape(stages, replicas, micro_batch)).best_of(replicas)


def _with_all_seated(ranking: Ranking, request: PlanRequest) -> Ranking:
    """Add a plan to the ranking in which all workers have a seat, if that makes steps clearly shorter.

    Pipelines of two depths are looked at for as many pipelines as the best plans have: what is best for 48 of 51
    workers is a good beginning for all of them. Some get one stage more, until every worker has a seat.
    """
    if not _may_mix_depths(request) or not ranking.plans:
        return ranking
    found = ranking.found
    least = CLEARLY * _score(found[0], request)
    numbers = {plan.replicas: plan for plan in reversed(ranking.plans[:_MIXED])}
    for replicas, plan in numbers.items():
        depth, deeper = divmod(request.count, replicas)
        if replicas == 1 or not deeper or not 1 <= depth < plan.sections:
            continue
        at_best_s = plan.step_s * plan.workers / request.count
        if request.score(request.count, at_best_s) < least:
            depths = [depth + 1] * deeper + [depth] * (replicas - deeper)
            alike = [equal_pipelines(request, each, replicas, plan.micro_batch) for each in (depth + 1, depth)]
            mix = of_depths(depths, [each and each.plan for each in alike], request)
            if mix is not None and _score(mix, request) < least:
                found.append(mix)
    return ranking.of(_best_first(request, found))


def _may_mix_depths(request: PlanRequest) -> bool:
    """Return whether pipelines may be of different depth.

    Not where the user has fixed one; where replicas of a stage share out their state; or where nothing was measured:
    nominal figures do not know what a stage more is worth.
    """
    is_free = request.mixes and request.stages is None and request.leaves_idle
    return is_free and not request.calibration.optimizer.sharded


def _sweep(request: PlanRequest, depths: range, sizes: tuple[int, ...], effort: Effort) -> Ranking:
    """Rank equal pipelines of these depths and micro-batch sizes."""
    builders = {m: Builder(request, m) for m in sizes}
    possible = [Depth(stages, m) for m in sizes for stages in depths if builders[m].guesser.fits(stages)]
    first = builders[sizes[0]]  # has the closest miss
    shapes = [first.guesser.guesses(stages)[0].shape for stages in depths if not first.guesser.fits(stages)]
    misfits = list(map(first.misfit, shapes))
    found = Search(request, builders, possible, effort).run()
    shown, rest = found.best[: request.wanted], found.best[request.wanted :]
    ordered = [*map(with_best_order, shown), *rest]
    promised = [each._replace(plan=builders[each.plan.micro_batch].promised(each.plan)) for each in ordered]
    ranked = _best_first(request, promised)
    fitting = {best.plan.stages for best in ranked} | {built.shape.stages for built in found.bounded}
    shallow = _shallow(builders[min(sizes)], found.guessed, min(fitting, default=0))
    unseen = {depth.stages for depth in found.guessed} - {misfit.shape.stages for misfit in shallow}
    without_plans = Ranking(
        outpaced=tuple(PrunedPlan(**built.shape._asdict(), at_least_s=built.bound_s) for built in found.bounded),
        rejected=_rejections([*misfits, *found.misfits, *shallow], fitting | unseen),
    )
    return without_plans.of(ranked)


def _shallow(builder: Builder, guessed: frozenset[Depth], deepest: int) -> list[OutOfMemory]:
    """Rejections of depths below all that fit: the search skipped them, but users ask why they are missing.

    Args:
        builder: of the smallest micro-batches.
        guessed: depths that were not built.
        deepest: the least depth that fits.
    """
    found: list[OutOfMemory] = []
    for stages in sorted(depth.stages for depth in guessed if depth.micro_batch == builder.profile.micro_batch):
        for guess in builder.guesser.guesses(stages) if stages < deepest else ():
            outcome = builder.first(guess)
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


def _best_first(request: PlanRequest, found: Sequence[Simulated]) -> list[Simulated]:
    """Sort by score; of equal plans the one with fewer stages comes first, which loses less per failure."""
    return sorted(found, key=lambda each: (_score(each, request), each.plan.stages))


def _score(found: Simulated, request: PlanRequest) -> float:
    return request.score(found.plan.workers, found.step_s)
