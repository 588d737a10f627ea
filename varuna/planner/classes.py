"""Pipelines on devices of several classes: each pipeline on one class, cut by what that class was calibrated to take.

All share m, and the batch is dealt so that they end together. Beside that, every class is tried without the others, and
the best mix without each of its classes. Where a class has too few devices for a pipeline of its own, pipelines are
tried that run on several (``planner.spanning``); where classes are nearly as fast or none has enough memory alone, all
workers as if they were of the slowest class. Pipelines reach over several regions only if nothing fits otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from varuna.core.devices import as_if_equal, region_of
from varuna.core.plan import Plan
from varuna.planner.asking.ranking import Ranking, Rejection
from varuna.planner.asking.request import PlanRequest
from varuna.planner.effort import EFFORT, Effort
from varuna.planner.one_class import rank_class
from varuna.planner.pricing.network import across_regions, are_apart
from varuna.planner.pricing.predict import Simulated
from varuna.planner.spanning import spanning
from varuna.planner.unlike import CLEARLY, at_worker_speeds, join_parts, rate_of

_DEPTHS = 3
"""Plans of a class that are tried beside those of the others."""
_MOST_ALONE = 3
"""Pipelines of a class that are kept for themselves, at most, as is tried."""
_ALIKE = 1.5
"""Up to so many times as long classes may compute to be in one pipeline, where each fits alone."""
_HEARD = 0.3
"""A class that does so much less than the fastest one has no say in m."""
_FEW = 64
"""Up to so many workers, pipelines over several classes are tried though each class has pipelines of its own."""


def rank_classes(request: PlanRequest, effort: Effort = EFFORT) -> Ranking:
    """The plans for workers of several classes, best first.

    Args:
        request: with classes.
        effort: how far walks to neighbours of short plans go, all classes together.
    """
    shared = effort.shared_by(len(request.classes))
    alone = {name: _ranked_alone(request, name, shared) for name in request.classes}
    found = [each for ranking in alone.values() for each in ranking.found]
    rejected = tuple(_closest(request, name, ranking) for name, ranking in alone.items() if ranking.rejected)
    if not found and len(alone) == 1:
        return Ranking(rejected=rejected)
    if len(alone) > 1:
        found += _of_several(request, alone, shared)
        is_apart = are_apart(alone)
        if not found or not may_mix_classes(request) or (not is_apart and _are_alike(request)):
            as_one = rank_class(_through_regions(request).as_slowest(), shared)
            found += as_one.found
            if not found:
                return as_one
    if not request.leaves_idle:
        most = max(each.plan.workers for each in found)
        found = [each for each in found if each.plan.workers == most]
        # Only pipelines that are for a class say what it can do.
        found = [each for each in found if each.plan.is_by_class] or found
    once = {each.plan: each for each in found}.values()
    ranked = sorted(once, key=lambda each: (_score(each, request), each.plan.stages))
    fits = {name for name, ranking in alone.items() if ranking.plans}
    unfit = tuple(each for each in rejected if each.device_class not in fits)
    return Ranking(rejected=unfit).of(ranked)  # each class has its own bounds


def _ranked_alone(request: PlanRequest, name: str, effort: Effort, **changes: object) -> Ranking:
    """The ranking of one class; its plans say that they are for it."""
    asked = request.of_class(name)
    ranking = rank_class(asked.model_copy(update={"wanted": max(asked.wanted, _DEPTHS), **changes}), effort)
    return replace(ranking, plans=tuple(plan.with_each_pipeline(device_class=name) for plan in ranking.plans))


def _beside_others(request: PlanRequest, name: str, effort: Effort, micro_batch: int, share: float) -> Sequence[Plan]:
    """The best plans of one class with the m of others, for its share of the batch."""
    batch = max(micro_batch, round(request.global_batch * share))
    fixed = {"global_batch": batch, "micro_batch": micro_batch, "lowers_micro_batch": False, "mixes": False}
    return _ranked_alone(request, name, effort, **fixed).plans[:_DEPTHS]


def _closest(request: PlanRequest, name: str, ranking: Ranking) -> Rejection:
    """The closest miss of a class alone."""
    closest = min(ranking.rejected, key=lambda each: (each.missing_bytes or 0, each.stages))
    reason = f"{request.count_of(name)} of {name or 'an unknown class'} alone: {closest.reason}"
    return closest.model_copy(update={"reason": reason, "device_class": name})


def _of_several(request: PlanRequest, alone: Mapping[str, Ranking], effort: Effort) -> list[Simulated]:
    """Plans for several of these classes, each pipeline or stage for one."""
    is_apart, fits = are_apart(alone), any(ranking.plans for ranking in alone.values())
    found: list[Simulated] = []
    for part in _regions(request) if is_apart else ():
        found += _of_several(part, {name: alone[name] for name in part.classes}, effort)
    if not is_apart or not (found or fits):
        found += _over_several(_through_regions(request), alone, effort)
    if may_mix_classes(request):
        found += _mixes(request, {name: alone[name] for name in alone if alone[name].plans}, effort)
    return found


def may_mix_classes(request: PlanRequest) -> bool:
    """Return whether pipelines may be cut by class: not with a sharded optimizer, or links between GPUs."""
    return request.mixes and not request.calibration.optimizer.sharded


def _regions(request: PlanRequest) -> list[PlanRequest]:
    """The same question for each region that has workers of several classes."""
    regions: dict[str, list[str]] = {}
    for name in request.classes:
        regions.setdefault(region_of(name), []).append(name)
    return [request.of_classes(names) for names in regions.values() if len(names) > 1]


def _through_regions(request: PlanRequest) -> PlanRequest:
    """The same question as if all messages went from one region to another, if there are several."""
    if not are_apart(request.classes):
        return request
    network = across_regions(request.calibrations)
    known = request.calibrations.each(lambda each: each.model_copy(update={"across_vms": network}))
    return request.model_copy(update={"calibrations": known})


def _are_alike(request: PlanRequest) -> bool:
    """Return whether the slowest class is so little slower that pipelines of several classes may be worth it."""
    times_s = [request.calibrations.of(name).compute_s(1) for name in request.classes]
    return max(times_s) <= _ALIKE * min(times_s)


def _score(found: Simulated, request: PlanRequest) -> float:
    """The figure that plans are ranked by, the least first: seconds, or dollars, per step.

    A plan that takes all for the slowest says nothing of what each class can do: it must be clearly faster.
    """
    plan = found.plan
    doubt = 1.0 if plan.is_by_class or not request.classes else 1 / CLEARLY
    price = 1.0 if request.objective == "time" else request.hourly(plan.classes) or plan.workers
    return plan.step_s * price * doubt


# -- each pipeline on several --------------------------------------------------------------------------------------


def _over_several(request: PlanRequest, alone: Mapping[str, Ranking], effort: Effort) -> list[Simulated]:
    """Pipelines over several classes, if some class has no pipeline of its own or all are few."""
    lacks = any(not ranking.plans for ranking in alone.values())
    if not may_mix_classes(request) or request.stages is not None or not (lacks or request.count <= _FEW):
        return []
    fitting = {name: ranking.plans[0] for name, ranking in alone.items() if ranking.plans}
    equal = request.model_copy(update={"workers": as_if_equal(request.workers)})
    spanned = spanning(equal, [plan.micro_batch for plan in fitting.values()])
    found = [*spanned, *with_pipelines_beside(equal, fitting, spanned, effort)]
    return [at_worker_speeds(each, request) for each in found]


def with_pipelines_beside(
    request: PlanRequest, alone: Mapping[str, Plan], spanned: Sequence[Simulated], effort: Effort
) -> list[Simulated]:
    """Plans with pipelines on several classes, and others on one.

    Those have what pipelines on several leave idle, or one, two or three pipelines of a class, cut as when it is alone.

    Args:
        request: with the classes.
        alone: the best plan of each class that holds a pipeline alone.
        spanned: the best plans whose pipelines are all on several classes.
        effort: how far walks go for the pipelines of one class.
    """
    tried = [*spanned[:1], *_of_fewer(request, alone)]
    found = [_beside(request, each.plan, alone, effort) for each in tried]
    return [each for each in found if each is not None]


def _of_fewer(request: PlanRequest, alone: Mapping[str, Plan]) -> Iterator[Simulated]:
    """Pipelines on several classes that leave some pipelines to one."""
    for kept, plan in alone.items():
        for number in range(1, _MOST_ALONE + 1):
            left = request.count_of(kept) - number * plan.stages
            if left < 1:
                break
            yield from spanning(request.with_count(kept, left), [plan.micro_batch])[:1]


def _beside(request: PlanRequest, spanned: Plan, alone: Mapping[str, Plan], effort: Effort) -> Simulated | None:
    """The plan, with pipelines of one class of all workers that it leaves idle; None if there can be none."""
    parts, rate = [spanned], rate_of(spanned)
    for name, plan in alone.items():
        left = request.count_of(name) - spanned.classes.get(name, 0)
        if left:
            expected = rate_of(plan) * left / plan.workers
            share, idle = expected / (rate + expected), request.with_count(name, left)
            parts += _beside_others(idle, name, effort, spanned.micro_batch, share)[:1]
    return join_parts(request, parts) if len(parts) > 1 else None


# -- each pipeline on one ------------------------------------------------------------------------------------------


class _Mix(NamedTuple):
    parts: Sequence[Plan]
    simulated: Simulated


def _mixes(request: PlanRequest, alone: Mapping[str, Ranking], effort: Effort) -> list[Simulated]:
    """The best plan that uses all of these classes, and what is better than it with some of them."""
    if len(alone) < 2:
        return []
    rates = {name: rate_of(ranking.plans[0]) for name, ranking in alone.items()}
    heard = [
        name for name in sorted(rates, key=lambda name: -rates[name]) if rates[name] >= _HEARD * max(rates.values())
    ]
    sizes = dict.fromkeys(alone[name].plans[0].micro_batch for name in heard)
    tried = [_of_all(request, alone, rates, micro_batch, effort) for micro_batch in sizes]
    found = [mix for mix in tried if mix is not None]
    if not found:
        return []
    best = min(found, key=lambda mix: _score(mix.simulated, request))
    return [best.simulated, *_without_one(request, best)]


def _of_all(
    request: PlanRequest, alone: Mapping[str, Ranking], rates: Mapping[str, float], micro_batch: int, effort: Effort
) -> _Mix | None:
    """Pipelines of all classes with this m. Each class first gets the plans that suit its share of the batch."""
    whole = sum(rates.values())
    every = [_beside_others(request, name, effort, micro_batch, rates[name] / whole) for name in alone]
    choices = [plans for plans in every if plans]
    if len(choices) < 2:
        return None
    chosen = [each[0] for each in choices]
    quick = join_parts(request, chosen, rounds=1)
    for position in range(len(choices)):
        for other in choices[position][1:]:
            tried = [*chosen[:position], other, *chosen[position + 1 :]]
            mix = join_parts(request, tried, rounds=1)
            if mix is not None and (quick is None or mix.step_s < quick.step_s):
                chosen, quick = tried, mix
    best = join_parts(request, chosen)
    if best is None:
        return None
    for position, part in enumerate(chosen):  # one of two depths, of a class that would leave workers over
        plan = alone[part.first.device_class].plans[0]
        if not plan.is_uniform and plan.micro_batch == micro_batch:
            tried = [*chosen[:position], plan, *chosen[position + 1 :]]
            mix = join_parts(request, tried)
            if mix is not None and mix.step_s < best.step_s:
                chosen, best = tried, mix
    return _Mix(chosen, best)


def _without_one(request: PlanRequest, mix: _Mix) -> list[Simulated]:
    """The same without one of three classes or more, which may be too slow to be worth its messages."""
    if len(mix.parts) < 3:
        return []
    left = ([part for part in mix.parts if part is not each] for each in mix.parts)
    return [found for parts in left if (found := join_parts(request, parts)) is not None]
