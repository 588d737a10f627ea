"""Micro-batches dealt to pipelines that are not alike, so that all end together, as whole ones can."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Cut, Pipelines, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import Simulated, predictions

_ROUNDS = 3
"""Of finding by how much one pipeline is faster than another, from what a whole step takes."""


class PipelineKind(NamedTuple):
    """Pipelines that are cut alike."""

    cut: Cut
    replicas: int
    pace: float
    """Micro-batches that one of them runs while one of the first kind runs 1: a guess."""


def dealt(kinds: Sequence[PipelineKind], like: Plan, request: PlanRequest, *, rounds: int = _ROUNDS) -> Simulated:
    """The plan of these pipelines; the kinds are simulated in turns with the dealing, until all end together.

    Args:
        kinds: those come first whose pipelines are the fastest.
        like: has everything else.
        request: what a step is, and the calibration of each class of devices.
        rounds: of simulating and dealing anew.
    """
    first, rest, paces = kinds[0], kinds[1:], [kind.pace for kind in kinds]
    replicas = sum(kind.replicas for kind in kinds)
    alike = like.as_if_all(first.cut).model_copy(update={"replicas": replicas, "step_s": 0.0})
    tried = list[Simulated]()
    for _ in range(rounds):
        shares = zip(rest, paces[1:], strict=True)
        more = tuple(Pipelines.of(kind.cut, replicas=kind.replicas, pace=pace) for kind, pace in shares)
        plan = alike.model_copy(update={"more": more})
        found = predictions(plan, request.calibration, gpus_per_vm=request.gpus_per_vm)
        longest = max(found, key=attrgetter("step_s"))
        tried.append(Simulated(plan.model_copy(update={"step_s": longest.step_s}), longest))
        ended_s = [each.step_s for each in found]
        paces = [min(1.0, pace * ended_s[0] / end_s) for pace, end_s in zip(paces, ended_s, strict=True)]
    return min(tried, key=attrgetter("step_s"))
