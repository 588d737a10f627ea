"""A few real steps by the real engine: what an action and a step cost beyond their sections.

Policies, inboxes, messages packed and unpacked, threads that share a core with the one that computes: all of that
is small, and missing it makes every prediction too short.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

from varuna.calibration.measure.clock import clock_over
from varuna.calibration.samples import PilotSamples
from varuna.calibration.statistics import mean_time
from varuna.core.model import ModelFacts
from varuna.core.plan import Plan
from varuna.engine.pipeline.action_times import StepTimes
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.planner.balance import balance
from varuna.schedule.actions import Kind
from varuna.schedule.policy import stash_limit

_POLICY = "varuna"

WARM_STEPS = 2
"""The first is applied before its vote, and the optimizer builds its state."""
STEPS = 12


class PilotTimes(NamedTuple):
    """What a section takes for one micro-batch, as measured in place."""

    forward_s: float
    recompute_s: float
    backward_s: float


def pilot_plan(times: Sequence[PilotTimes], *, workers: int, micro_batch: int) -> Plan:
    """One pipeline over all workers, or as many as there are sections, long enough to be in its stride.

    Args:
        times: of each section.
        workers: how many there are.
        micro_batch: m, examples.
    """
    stages = min(workers, len(times))
    micro_batches = 3 * stages + 3
    inner = [each.forward_s + each.recompute_s + each.backward_s for each in times]
    last = [each.recompute_s + each.backward_s for each in times]
    return Plan(
        stages=stages,
        replicas=1,
        micro_batch=micro_batch,
        global_batch=micro_batch * micro_batches,
        starts=balance(inner, [min(pair) for pair in zip(inner, last, strict=True)], stages),
        sections=len(times),
        policy=_POLICY,
        stash_limits=tuple(stash_limit(stages, stage, micro_batches, _POLICY) for stage in range(stages)),
    )


def run_pilot(
    open_session: Callable[[int, StaticMembership], Session], world: World, plan: Plan, facts: ModelFacts
) -> PilotSamples | None:
    """Run ``WARM_STEPS`` + ``STEPS`` steps of ``plan``; None on ranks that have no part in it.

    Args:
        open_session: opens a session of a number of steps, with a membership.
        world: the ranks that take part.
        plan: what runs.
        facts: of the model.
    """
    meter: _Meter | None = None
    steps: list[StepTimes] = []
    with closing(
        open_session(WARM_STEPS + STEPS, StaticMembership(world, lambda job, workers, micro_batch: plan))
    ) as session:
        for committed in session.steps():
            assert session.current is not None
            meter = meter or _Meter(session.current.stage)
            if committed.step < WARM_STEPS:
                meter.forget()
            elif session.current.runtime.times is not None:
                steps.append(session.current.runtime.times)
    if world.rank >= plan.workers or meter is None:
        return None
    stage = plan.place_of(world.rank).stage
    own = [facts.sections[section] for section in plan.sections_of(stage)]
    return PilotSamples(
        stages=plan.stages,
        state_bytes=sum(each.parameter_bytes + each.trainable_bytes + each.optimizer_bytes for each in own),
        first=plan.sections_of(stage).start,
        stop=plan.sections_of(stage).stop,
        micro_batch=plan.micro_batch,
        whole_s={
            kind.value: mean_time(seconds)
            for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
            if (seconds := [each for step in steps for each in step.seconds_of(kind)])
        },
        inside_s={kind.value: mean_time(seconds) for kind, seconds in meter.seconds.items()},
        step_s=tuple(between(before, after) for before, after in pairwise(steps)) if stage == 0 else (),
    )


def between(before: StepTimes, after: StepTimes) -> float:
    """Seconds from the last action of a step to the first action or wait of the next."""
    return min(took.begin_s for took in (*after.actions, *after.waits)) - before.end_s


class _Meter:
    """Notes the time that a stage spends in its sections, by kind of action."""

    def __init__(self, stage: Stage) -> None:
        self._clock = clock_over(stage.job.traffic.streams)
        self._spans: dict[Kind, list[tuple[Any, Any]]] = {}
        for name, kind in (("forward", Kind.FORWARD), ("record", Kind.RECOMPUTE), ("backward", Kind.BACKWARD)):
            setattr(stage, name, self._timed(getattr(stage, name), kind))

    def forget(self) -> None:
        """Drop what was noted so far."""
        self._spans.clear()

    @property
    def seconds(self) -> dict[Kind, list[float]]:
        """Seconds of each action, by kind."""
        return {kind: [self._clock.seconds(*span) for span in spans] for kind, spans in self._spans.items()}

    def _timed(self, work: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        @wraps(work)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self._clock.mark()
            result = work(*arguments, **options)
            self._spans.setdefault(kind, []).append((begin, self._clock.mark()))
            return result

        return timed
