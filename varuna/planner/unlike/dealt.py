"""Micro-batches dealt to pipelines that are not alike, so that all end together, as whole ones can."""

from collections.abc import Sequence
from operator import attrgetter

from varuna.core.plan import Pipeline, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import SHORTEST_S, Prediction, Simulated, predictions

_ROUNDS = 3
"""Of finding how fast pipelines are from what a whole step takes."""
_LEAST = 1e-3
"""Of the first pipelines' pace: less would hardly be a micro-batch."""


def dealt(kinds: Sequence[Pipeline], like: Plan, request: PlanRequest, *, rounds: int = _ROUNDS) -> Simulated:
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
        longest = max(found, key=attrgetter("step_s"))
        tried[plan.shares] = Simulated(plan.model_copy(update={"step_s": longest.step_s}), longest)
        paces = _paces(kinds, found, plan.micro_batches)
    return min(tried.values(), key=attrgetter("step_s"))


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
