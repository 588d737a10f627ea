"""Pipelines on devices of several classes: each pipeline on one class, cut by what that class was calibrated to take.

All share m, and the batch is dealt so that they end together. Beside that, every class is tried without the others, and
the best mix without each of its classes. Where a class has too few devices for a pipeline of its own, pipelines are
tried that run on several (``planner.spanning``); where classes are nearly as fast or none has enough memory alone, all
workers as if they were of the slowest class. Pipelines reach over several regions only if nothing fits otherwise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from varuna.calibration.format import Calibrations
from varuna.core.devices import as_if_equal, of_no_class, region_of
from varuna.core.plan import Plan
from varuna.planner.asking.ranking import Ranking, Rejection
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.network import across_regions, are_apart
from varuna.planner.pricing.predict import Prediction, Simulated
from varuna.planner.unlike.left_over import CLEARLY
from varuna.planner.unlike.parts import DEPTHS, Rank, Span, ranked_alone, rate_of, together
from varuna.planner.unlike.speeds import of_these_workers

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


_ALIKE = 1.5
"""Up to so many times as long classes may compute to be in one pipeline, where each fits alone."""
_HEARD = 0.3
"""A class that does so much less than the fastest one has no say in m."""
_FEW = 64
"""Up to so many workers, pipelines over several classes are tried though each class has pipelines of its own."""


def by_class(request: PlanRequest, rank: Rank, span: Span) -> Ranking:
    """The plans for workers of several classes, best first.

    Args:
        request: with classes.
        rank: ranks plans for workers of one class.
        span: finds pipelines that run on several.
    """
    alone = {name: ranked_alone(request, name, rank) for name in request.classes}
    found = {
        plan: prediction
        for ranking in alone.values()
        for plan, prediction in zip(ranking.plans, ranking.predictions, strict=True)
    }
    rejected = tuple(_closest(request, name, ranking) for name, ranking in alone.items() if ranking.rejected)
    if not found and len(alone) == 1:
        return Ranking(plans=(), predictions=(), outpaced=(), rejected=rejected)
    if len(alone) > 1:
        found |= _of_several(request, alone, rank, span)
        is_apart = are_apart(alone)
        if not found or not may_mix_classes(request) or (not is_apart and _are_alike(request)):
            as_one = rank(as_slowest(_through_regions(request)))
            found |= dict(zip(as_one.plans, as_one.predictions, strict=True))
            if not found:
                return as_one
    if not request.leaves_idle:
        most = max(plan.workers for plan in found)
        found = {plan: prediction for plan, prediction in found.items() if plan.workers == most}
        # Only pipelines that are for a class say what it can do.
        found = {plan: prediction for plan, prediction in found.items() if plan.is_by_class} or found
    ranked = sorted(found.items(), key=lambda each: (_score(each[0], request), each[0].stages))
    fits = {name for name, ranking in alone.items() if ranking.plans}
    return Ranking(
        plans=tuple(plan for plan, _ in ranked),
        predictions=tuple(prediction for _, prediction in ranked),
        outpaced=(),  # each class has its own bounds
        rejected=tuple(each for each in rejected if each.device_class not in fits),
    )


def _of_several(request: PlanRequest, alone: Mapping[str, Ranking], rank: Rank, span: Span) -> dict[Plan, Prediction]:
    """Plans for several of these classes, each pipeline or stage for one."""
    is_apart, fits = are_apart(alone), any(ranking.plans for ranking in alone.values())
    found: dict[Plan, Prediction] = {}
    for part in _regions(request) if is_apart else ():
        found |= _of_several(part, {name: alone[name] for name in part.classes}, rank, span)
    if not is_apart or not (found or fits):
        found |= dict(_over_several(_through_regions(request), alone, rank, span))
    if may_mix_classes(request):
        found |= dict(_mixes(request, {name: alone[name] for name in alone if alone[name].plans}, rank))
    return found


def may_mix_classes(request: PlanRequest) -> bool:
    """Whether pipelines may be cut by class: not where replicas share out their state, or links are between GPUs."""
    return request.mixes and not request.calibration.optimizer.sharded


def as_slowest(request: PlanRequest) -> PlanRequest:
    """The request as if all workers were of the slowest class, and had the least memory of any."""
    parts = [request.of_class(name) for name in request.classes]
    slowest = max(parts, key=lambda part: part.calibration.compute_s(1))
    limits = [part.limit_bytes for part in parts if part.limit_bytes is not None]
    hosts = [part.host_limit_bytes for part in parts if part.host_limit_bytes is not None]
    hardware = slowest.calibration.hardware.model_copy(
        update={"host_memory_bytes": min(hosts, default=None), "gpus_per_vm": 1 if _vms(parts) > 1 else slowest.vm_size}
    )
    return slowest.model_copy(
        update={
            "calibrations": Calibrations.of_one(slowest.calibration.model_copy(update={"hardware": hardware})),
            "workers": of_no_class(request.workers),
            "memory_bytes": min(limits, default=None),
        }
    )


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
    """Whether the slowest class is so little slower that pipelines of several classes may be worth it."""
    times_s = [request.calibrations.of(name).compute_s(1) for name in request.classes]
    return max(times_s) <= _ALIKE * min(times_s)


def _vms(parts: Iterable[PlanRequest]) -> int:
    return len({part.vm_size for part in parts})


# -- one class ---------------------------------------------------------------------------------------------------


def _closest(request: PlanRequest, name: str, ranking: Ranking) -> Rejection:
    """The closest miss of a class alone."""
    closest = min(ranking.rejected, key=lambda each: (each.missing_bytes or 0, each.stages))
    reason = f"{request.count_of(name)} of {name or 'an unknown class'} alone: {closest.reason}"
    return closest.model_copy(update={"reason": reason, "device_class": name})


# -- several -----------------------------------------------------------------------------------------------------


def _over_several(request: PlanRequest, alone: Mapping[str, Ranking], rank: Rank, span: Span) -> list[Simulated]:
    """Pipelines over several classes, if some class has no pipeline of its own or all are few."""
    lacks = any(not ranking.plans for ranking in alone.values())
    if not may_mix_classes(request) or request.stages is not None or not (lacks or request.count <= _FEW):
        return []
    fitting = {name: ranking.plans[0] for name, ranking in alone.items() if ranking.plans}
    equal = request.model_copy(update={"workers": as_if_equal(request.workers)})
    spanned = span(equal, [plan.micro_batch for plan in fitting.values()])
    found = [*spanned, *with_pipelines_beside(equal, fitting, spanned, rank, span)]
    return [of_these_workers(each, request) for each in found]


def _mixes(request: PlanRequest, alone: dict[str, Ranking], rank: Rank) -> list[tuple[Plan, Prediction]]:
    """The best plan that uses all of these classes, and what is better than it with some of them."""
    if len(alone) < 2:
        return []
    rates = {name: rate_of(ranking.plans[0]) for name, ranking in alone.items()}
    heard = [
        name for name in sorted(rates, key=lambda name: -rates[name]) if rates[name] >= _HEARD * max(rates.values())
    ]
    sizes = dict.fromkeys(alone[name].plans[0].micro_batch for name in heard)
    tried = [_of_all(request, alone, rates, micro_batch, rank) for micro_batch in sizes]
    found = [mix for mix in tried if mix is not None]
    if not found:
        return []
    best = min(found, key=lambda mix: _score(mix.simulated.plan, request))
    mixes = [best.simulated, *_without_one(request, best)]
    return [(each.plan, each.prediction) for each in mixes]


class _Mix(NamedTuple):
    parts: tuple[Plan, ...]
    simulated: Simulated


def _of_all(
    request: PlanRequest, alone: dict[str, Ranking], rates: dict[str, float], micro_batch: int, rank: Rank
) -> _Mix | None:
    """Pipelines of all classes with this m. Each class first gets the plans that suit its share of the batch."""
    whole = sum(rates.values())
    choices: list[tuple[Plan, ...]] = []
    for name in alone:
        batch = max(micro_batch, round(request.global_batch * rates[name] / whole))
        asked = {"global_batch": batch, "micro_batch": micro_batch, "lowers_micro_batch": False, "mixes": False}
        plans = ranked_alone(request, name, rank, **asked).plans[:DEPTHS]
        if plans:
            choices.append(plans)
    if len(choices) < 2:
        return None
    chosen = [each[0] for each in choices]
    quick = together(request, chosen, rounds=1)
    for position in range(len(choices)):
        for other in choices[position][1:]:
            tried = [*chosen[:position], other, *chosen[position + 1 :]]
            mix = together(request, tried, rounds=1)
            if mix is not None and (quick is None or mix.step_s < quick.step_s):
                chosen, quick = tried, mix
    best = together(request, chosen)
    if best is None:
        return None
    for position, part in enumerate(chosen):  # one of two depths, of a class that would leave workers over
        plan = alone[part.first.device_class].plans[0]
        if not plan.is_uniform and plan.micro_batch == micro_batch:
            tried = [*chosen[:position], plan, *chosen[position + 1 :]]
            mix = together(request, tried)
            if mix is not None and mix.step_s < best.step_s:
                chosen, best = tried, mix
    return _Mix(tuple(chosen), best)


def _without_one(request: PlanRequest, mix: _Mix) -> list[Simulated]:
    """The same without one of three classes or more, which may be too slow to be worth its messages."""
    if len(mix.parts) < 3:
        return []
    left = ([part for part in mix.parts if part is not each] for each in mix.parts)
    return [found for parts in left if (found := together(request, parts)) is not None]


def _score(plan: Plan, request: PlanRequest) -> float:
    """The figure that plans are ranked by, the least first: seconds, or dollars, per step.

    A plan that takes all for the slowest says nothing of what each class can do: it must be clearly faster.
    """
    doubt = 1.0 if plan.is_by_class or not request.classes else 1 / CLEARLY
    price = 1.0 if request.objective == "time" else request.hourly(plan.classes) or plan.workers
    return plan.step_s * price * doubt
