"""Pipelines that are not alike: of different speed, depth or device class. Pure.

Each is cut as is best for equal pipelines on equal workers. Micro-batches are dealt so that all end together, as whole
ones can.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

from varuna.core.plan import Pipeline, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.predict import SHORTEST_S, Prediction, Simulated, predictions, simulated
from varuna.planner.pricing.profile import profile

CLEARLY = 0.99
"""So much shorter must a step be for pipelines that are not alike: the next plan has less in common with them."""
_ROUNDS = 3
"""Of finding how fast pipelines are from what a whole step takes."""
_LEAST = 1e-3
"""Of the first pipelines' pace: less would hardly be a micro-batch."""


def deal_batch(kinds: Sequence[Pipeline], like: Plan, request: PlanRequest, *, rounds: int = _ROUNDS) -> Simulated:
    """The plan of these pipelines; the kinds are simulated in turns with the dealing, until all end together.

    Args:
        kinds: those come first whose pipelines are the fastest; their paces are guesses.
        like: has everything else.
        request: what a step is, and the calibration of each class of devices.
        rounds: of simulating and dealing anew.
    """
    paces = [kind.pace for kind in kinds]
    tried: dict[tuple[int, ...], Simulated] = {}  # by shares
    for _ in range(rounds):
        shares = zip(kinds, (1.0, *paces[1:]), strict=True)
        pipelines = tuple(kind.model_copy(update={"pace": pace}) for kind, pace in shares)
        plan = like.model_copy(update={"pipelines": pipelines, "step_s": 0.0})
        if plan.shares in tried:
            break
        found = predictions(plan, request.calibrations, gpus_per_vm=request.gpus_per_vm)
        tried[plan.shares] = _with_longest(plan, found)
        paces = _paces(kinds, found, plan.micro_batches)
    return min(tried.values(), key=attrgetter("step_s"))


def _with_longest(plan: Plan, found: Sequence[Prediction]) -> Simulated:
    longest = max(found, key=attrgetter("step_s"))
    return Simulated(plan.model_copy(update={"step_s": longest.step_s}), longest)


def _paces(kinds: Sequence[Pipeline], found: Sequence[Prediction], micro_batches: int) -> list[float]:
    """The pace of each kind with which all steps end together, by a step of each.

    A pipeline of P stages takes about n + P - 1 of its micro-batches' times for n of them (``core.dealing``), and what
    follows its last backward. So one in which more follows runs fewer, and only for that.
    """
    fills = [kind.stages - 1 for kind in kinds]
    rates = [  # micro-batches per second of full speed
        (each.micro_batches + fill) / max(each.step_s - each.after_s, SHORTEST_S) / each.speed
        for each, fill in zip(found, fills, strict=True)
    ]
    strengths = [rate * kind.strength for rate, kind in zip(rates, kinds, strict=True)]
    begun = micro_batches + sum(fill * kind.replicas for fill, kind in zip(fills, kinds, strict=True))
    after = sum(each.after_s * strength for each, strength in zip(found, strengths, strict=True))
    end_s = (begun + after) / sum(strengths)
    ran = [rate * (end_s - each.after_s) for rate, each in zip(rates, found, strict=True)]
    return [min(1.0, max(_LEAST, each / max(ran[0], SHORTEST_S))) for each in ran]


# -- of different speed ------------------------------------------------------------------------------------------


def with_speeds(plan: Plan, request: PlanRequest) -> Simulated:
    """The plan with as many replicas as make it best, each with its speed: a slow one that would end last idles."""
    figures = profile(request.calibration, plan.micro_batch, streams_frozen=plan.streams_frozen)
    tried = [
        simulated(pipeline_costs(figures, each, gpus_per_vm=request.vm_size), each)
        for each in _of_fewer_replicas(plan, request)
    ]
    return min(tried, key=lambda each: request.score(each.plan.workers, each.step_s))


def _of_fewer_replicas(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
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


def at_worker_speeds(found: Simulated, request: PlanRequest) -> Simulated:
    """A plan that was made for workers of full speed, as those that there are run it."""
    plan = found.plan.at_speeds(request.workers)
    if not plan.speeds:
        return found
    return _with_longest(plan, predictions(plan, request.calibrations, gpus_per_vm=request.gpus_per_vm))


# -- of different depth or class ---------------------------------------------------------------------------------


def of_depths(depths: Sequence[int], alike: Sequence[Plan | None], request: PlanRequest) -> Simulated | None:
    """A plan of pipelines of these depths; None: those of some depth do not fit.

    Args:
        depths: descending.
        alike: for each depth, once, the plan of as many equal pipelines.
        request: which workers, and what a step is.
    """
    plans = [each for each in alike if each is not None]
    if len(plans) < len(alike):
        return None
    kinds = [
        plan.first.model_copy(update={"replicas": number, "pace": depth / depths[0], "speeds": ()})
        for plan, (depth, number) in zip(plans, Counter(depths).items(), strict=True)
    ]
    return deal_batch(kinds, plans[0], request)


def rate_of(plan: Plan) -> float:
    """Examples per second."""
    return plan.global_batch / plan.step_s if plan.step_s else float("inf")


def join_parts(request: PlanRequest, parts: Sequence[Plan], *, rounds: int = _ROUNDS) -> Simulated | None:
    """One plan of the pipelines of all parts, the fastest pipelines first; None: there are too few micro-batches."""
    kinds = [kind for part in parts for kind in _kinds(part)]
    kinds.sort(key=lambda kind: -kind.pace)
    micro_batch = parts[0].micro_batch
    if sum(kind.replicas for kind in kinds) > -(-request.global_batch // micro_batch):
        return None
    fastest = kinds[0].pace
    scaled = [kind.model_copy(update={"pace": kind.pace / fastest}) for kind in kinds]
    whole = parts[0].model_copy(update={"global_batch": request.global_batch})
    return deal_batch(scaled, whole, request, rounds=rounds)


def _kinds(part: Plan) -> Iterator[Pipeline]:
    """Pipelines of a part, with the examples per second of one of full speed as their pace."""
    each = rate_of(part) / sum(map(part.rate_of, range(part.replicas)))
    for replicas, pipeline in part.kinds:
        pace = each * part.rate_of(replicas.start) / part.speed_of(replicas.start)
        yield pipeline.model_copy(update={"pace": pace})
