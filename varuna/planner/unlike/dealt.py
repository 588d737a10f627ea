"""Micro-batches dealt to pipelines that are not alike, so that all end together, as whole ones can."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Cut, Pipelines, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import SHORTEST_S, Prediction, Simulated, predictions

_ROUNDS = 3
"""Of finding how fast pipelines are from what a whole step takes."""
_LEAST = 1e-3
"""Of the first pipelines' pace: less would hardly be a micro-batch."""


class PipelineKind(NamedTuple):
    """Pipelines that are cut alike."""

    cut: Cut
    replicas: int
    pace: float
    """Micro-batches that one of them runs while one of the first kind runs 1, both of full speed: a guess."""
    speeds: tuple[float, ...] = ()
    """By pipeline, fastest first; () if all are of full speed."""

    @property
    def strength(self) -> float:
        """How many pipelines of full speed are as fast."""
        return sum(self.speeds) or self.replicas


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
    speeds = tuple(speed for kind in kinds for speed in kind.speeds or (1.0,) * kind.replicas)
    changed = {"replicas": replicas, "step_s": 0.0, "speeds": speeds if min(speeds) < 1 else ()}
    alike = like.as_if_all(first.cut).model_copy(update=changed)
    tried: dict[tuple[int, ...], Simulated] = {}  # by shares
    for _ in range(rounds):
        shares = zip(rest, paces[1:], strict=True)
        more = tuple(Pipelines.of(kind.cut, replicas=kind.replicas, pace=pace) for kind, pace in shares)
        plan = alike.model_copy(update={"more": more})
        if plan.shares in tried:
            break
        found = predictions(plan, request.calibration, gpus_per_vm=request.gpus_per_vm)
        longest = max(found, key=attrgetter("step_s"))
        tried[plan.shares] = Simulated(plan.model_copy(update={"step_s": longest.step_s}), longest)
        paces = _paces(kinds, found, plan.micro_batches)
    return min(tried.values(), key=attrgetter("step_s"))


def _paces(kinds: Sequence[PipelineKind], found: Sequence[Prediction], micro_batches: int) -> list[float]:
    """The pace of each kind with which all steps end together, by a step of each.

    A pipeline of P stages takes about n + P - 1 of its micro-batches' times for n of them (``core.dealing``), and what
    follows its last backward. So one in which more follows runs fewer, and only for that.
    """
    fills = [kind.cut.stages - 1 for kind in kinds]
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
