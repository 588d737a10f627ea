"""The sweep: every depth P that the workers allow, every m worth trying, ranked (paper §"Parametrized Simulation")."""

from dataclasses import dataclass, replace

from pydantic import Field

from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.core.value import Value
from varuna.planner.build import Builder, Misfit
from varuna.planner.estimate import Depth, Guesser
from varuna.planner.micro_batch import candidate_sizes
from varuna.planner.pricing.predict import Prediction, Simulated
from varuna.planner.pricing.profile import profile
from varuna.planner.request import PlanRequest
from varuna.planner.search import search
from varuna.planner.split_last import with_best_split
from varuna.planner.unequal import with_speeds
from varuna.schedule.policy import check_policy

_WEIGHED = 8
"""Depths that are looked at for workers of different speed."""


class Rejection(Value):
    """A depth that cannot run."""

    stages: int = Field(description="P")
    replicas: int = Field(description="D that the workers would allow")
    micro_batch: int | None = Field(default=None, description="smallest m tried; None if memory is not why")
    reason: str
    missing_bytes: int | None = Field(default=None, description="at the worst stage; None if memory is not why")


class Outpaced(Value):
    """A plan that was not simulated: its bound cannot win."""

    stages: int
    replicas: int
    micro_batch: int
    at_least_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The result of ranking plans: those found, those outpaced, those rejected."""

    plans: tuple[Plan, ...]
    """Simulated, best first."""
    predictions: tuple[Prediction, ...]
    """Predictions of these plans, in their order."""
    outpaced: tuple[Outpaced, ...]
    rejected: tuple[Rejection, ...]


def rank_plans(request: PlanRequest) -> Ranking:
    """Rank every depth, or the requested one, with every m worth trying, or the requested one.

    Raises:
        UsageError: no such policy, no stages, or an m outside the global batch.
    """
    check_policy(request.policy)
    depths, rejected = _depths(request)
    if not depths:
        return Ranking(plans=(), predictions=(), outpaced=(), rejected=rejected)
    asked = request.model_copy(update={"wanted": max(request.wanted, _WEIGHED)}) if request.are_unequal else request
    for sizes in candidate_sizes(request):
        ranking = _sweep(asked, depths, sizes)
        if ranking.plans:
            break
    return _by_speed(ranking, request) if request.are_unequal else ranking


def _by_speed(ranking: Ranking, request: PlanRequest) -> Ranking:
    """The plans with replicas of different speed, best first."""
    ranked = _best_first(request, [with_speeds(plan, request) for plan in ranking.plans[:_WEIGHED]])
    return replace(
        ranking,
        plans=tuple(each.plan for each in ranked),
        predictions=tuple(each.prediction for each in ranked),
        outpaced=(),  # their bounds are for equal workers
    )


def _sweep(request: PlanRequest, depths: range, sizes: tuple[int, ...]) -> Ranking:
    builders: dict[int, Builder] = {}
    guessers: dict[int, Guesser] = {}
    possible: list[Depth] = []
    misfits: list[Misfit] = []
    for m in sizes:
        builder = builders[m] = Builder(request, profile(request.calibration, m))
        guesser = guessers[m] = Guesser(request, builder.profile, may_keep=builder.may_keep)
        for stages in depths:
            if guesser.fits(stages):
                possible.append(Depth(stages, m))
            elif m == sizes[0]:  # the closest miss
                misfits.append(builder.misfit(guesser.guesses(stages)[0].shape))
    found = search(request, builders, guessers, possible)
    shown, rest = found.best[: request.wanted], found.best[request.wanted :]
    ranked = _best_first(request, [*map(with_best_split, shown), *rest])
    fitting = {best.plan.stages for best in ranked} | {built.shape.stages for built in found.bounded}
    shallow = _shallow(builders, guessers, found.guessed, min(fitting, default=0))
    unseen = {depth.stages for depth in found.guessed} - {misfit.shape.stages for misfit in shallow}
    return Ranking(
        plans=tuple(best.plan for best in ranked),
        predictions=tuple(best.prediction for best in ranked),
        outpaced=tuple(Outpaced(**built.shape._asdict(), at_least_s=built.bound_s) for built in found.bounded),
        rejected=_rejections([*misfits, *found.misfits, *shallow], fitting | unseen),
    )


def _shallow(
    builders: dict[int, Builder], guessers: dict[int, Guesser], guessed: frozenset[Depth], deepest: int
) -> list[Misfit]:
    """Rejections of depths below all that fit: the search skipped them, but users ask why they are missing."""
    smallest = min(builders)
    found: list[Misfit] = []
    for stages in sorted(depth.stages for depth in guessed if depth.micro_batch == smallest):
        for guess in guessers[smallest].guesses(stages) if stages < deepest else ():
            outcome = builders[smallest].first(guess)
            if not isinstance(outcome, Misfit):
                return found
            found.append(outcome)
    return found


def _depths(request: PlanRequest) -> tuple[range, tuple[Rejection, ...]]:
    """Depths to try; or an error that says why the requested one is impossible."""
    stages, sections, workers = request.stages, request.calibration.section_count, request.workers
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


def _rejections(misfits: list[Misfit], possible: set[int]) -> tuple[Rejection, ...]:
    """For each depth that fits with no m, its closest miss."""
    closest: dict[int, Misfit] = {}
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
