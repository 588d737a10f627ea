"""Reasons why a run's steps take longer, or shorter, than was predicted. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from varuna.calibration.format import Calibrations
from varuna.core.plan import Plan
from varuna.core.times import RankTimes
from varuna.core.units import format_duration
from varuna.fleet.feedback.refine import costs_of
from varuna.planner.pricing.predict import predict

WORTH_SAYING = 0.10
"""Share of the predicted step time."""


class _Part(NamedTuple):
    """A part of a stage's step, and by how much it is off."""

    excess_s: float
    stage: int
    what: str


def explain_gap(calibrations: Calibrations, plan: Plan, stages: Sequence[RankTimes]) -> str | None:
    """Say what is off, where and by how much; None where prediction and run agree within 10 %.

    The cause is the part of a stage's step that differs most in the direction of the gap. Waits come last: they
    follow from what other stages do, so that they are the cause only where nothing else is off.

    Args:
        calibrations: that the prediction is made from.
        plan: that ran.
        stages: what its stages took.
    """
    predicted = predict(costs_of(calibrations, plan), plan)
    measured_s = max(each.step_s for each in stages)
    gap = measured_s / predicted.step_s - 1
    if abs(gap) <= WORTH_SAYING:
        return None
    sign = 1 if gap > 0 else -1
    optimizer_s, exposed_s = predicted.trace.costs.optimizer_s, predicted.trace.exposed_reduce_s
    parts: list[_Part] = []
    waits: list[_Part] = []
    for k, (each, guess) in enumerate(zip(stages, predicted.trace.stage_times, strict=True)):
        stage = predicted.trace.costs.stages[k]
        recompute_s = 0.0 if stage.keeps_all or k == len(stages) - 1 else stage.recompute_s
        further_s = predicted.repeated * (stage.forward_s + recompute_s + stage.backward_s)
        parts.append(_Part(each.compute_s - guess.compute_s - further_s, k, "compute"))
        if k == 0:  # the last to end: what follows its last action nobody hides
            parts.append(_Part(each.reduced_s - exposed_s, k, "all-reduces and tied gradients"))
            parts.append(_Part(each.ending_s - optimizer_s, k, "vote and optimizer step"))
        waiting_s = predicted.step_s - guess.compute_s - further_s - exposed_s - optimizer_s
        what = "waits for messages" if guess.transfer_s > guess.idle_s else "waits for other stages"
        waits.append(_Part(each.waited_s - waiting_s, k, what))
    missing_s = sign * (measured_s - predicted.step_s)
    cause = max(parts, key=lambda part: sign * part.excess_s)
    if sign * cause.excess_s < missing_s / 4:
        cause = max(waits, key=lambda part: sign * part.excess_s)
    more = "longer" if sign > 0 else "shorter"
    return (
        f"steps take {format_duration(measured_s)} where {format_duration(predicted.step_s)} were predicted "
        f"({abs(gap):.0%} {more}), most of all because of stage {cause.stage}: {cause.what}, "
        f"{format_duration(abs(cause.excess_s))} {more} in a step"
    )
