"""A few real steps by the real engine: what an action and a step cost beyond their sections.

Policies, inboxes, messages packed and unpacked, threads that share a core with the one that computes: all of that
is small, and missing it makes every prediction too short.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

from varuna.calibration.samples import PilotSamples
from varuna.calibration.statistics import mean_time
from varuna.core.model import ModelFacts
from varuna.core.plan import Pipeline, Plan
from varuna.core.times import Interval
from varuna.engine.pipeline.timeline import StepTimes
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.planner.balance import balance
from varuna.schedule.policy import stash_limit

_POLICY = "varuna"

_WARM_STEPS = 2
"""The first is applied before its vote, and the optimizer builds its state."""
_LEAST_STEPS, _MOST_STEPS = 4, 12
_BUDGET_S = 1.5
"""For the steps of one plan, beyond the fewest."""


class PilotTimes(NamedTuple):
    """Seconds that a section takes for one micro-batch, as measured in place."""

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
    micro_batches = 3 * stages
    inner = [each.forward_s + each.recompute_s + each.backward_s for each in times]
    last = [each.recompute_s + each.backward_s for each in times]
    return Plan(
        micro_batch=micro_batch,
        global_batch=micro_batch * micro_batches,
        pipelines=(
            Pipeline(
                bounds=(*balance(inner, [min(pair) for pair in zip(inner, last, strict=True)], stages), len(times)),
                stash_limits=tuple(stash_limit(stages, stage, micro_batches, _POLICY) for stage in range(stages)),
            ),
        ),
        policy=_POLICY,
    )


def pilot_steps(times: Sequence[PilotTimes], plan: Plan) -> int:
    """Choose a number of steps of ``plan`` to run, by what its slowest stage computes: more where they are short."""
    stages = [plan.first.sections_of(stage) for stage in range(plan.stages)]
    step_s = len(plan.micro_batches_of(0)) * max(sum(sum(times[section]) for section in stage) for stage in stages)
    return _WARM_STEPS + max(_LEAST_STEPS, min(_MOST_STEPS, int(_BUDGET_S / max(step_s, 1e-6)) - _WARM_STEPS))


def run_pilot(
    open_session: Callable[[int, StaticMembership], Session], world: World, plan: Plan, facts: ModelFacts, count: int
) -> PilotSamples | None:
    """Run ``count`` steps of ``plan``; None on ranks that have no part in it.

    Args:
        open_session: opens a session of a number of steps, with a membership.
        world: the ranks that take part.
        plan: what runs.
        facts: of the model.
        count: of steps; the first ones do not count.
    """
    steps: list[StepTimes] = []
    with closing(open_session(count, StaticMembership(world, lambda *_: plan))) as session:
        for committed in session.steps():
            assert session.current is not None
            runtime = session.current.runtime
            runtime.lookahead.times_sections = True
            if committed.step >= _WARM_STEPS and runtime.times is not None:
                steps.append(runtime.times)
    if world.rank >= plan.workers:
        return None
    stage = plan.place_of(world.rank).stage
    taken: dict[str, list[Interval]] = {}
    for took in (took for step in steps for took in step.actions):
        taken.setdefault(took.kind, []).append(took)
    own = [facts.sections[section] for section in plan.first.sections_of(stage)]
    return PilotSamples(
        stages=plan.stages,
        state_bytes=sum(each.parameter_bytes + each.trainable_bytes + each.optimizer_bytes for each in own),
        first=plan.first.sections_of(stage).start,
        stop=plan.first.sections_of(stage).stop,
        micro_batch=plan.micro_batch,
        whole_s={kind: mean_time([took.seconds for took in rows]) for kind, rows in taken.items()},
        inside_s={kind: mean_time([took.inside_s for took in rows]) for kind, rows in taken.items()},
        step_s=tuple(between(before, after) for before, after in pairwise(steps)) if stage == 0 else (),
    )


def between(before: StepTimes, after: StepTimes) -> float:
    """Seconds from the last action of a step to the first action or wait of the next."""
    return min(took.begin_s for took in (*after.actions, *after.waits)) - before.end_s
