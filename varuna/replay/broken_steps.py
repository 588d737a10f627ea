"""How far each rank is at any moment of a step, so that a loss costs what the survivors' sums lack.

One simulated pipeline stands for all replicas of a plan. What survivors then say they hold is judged by the state
machine of a run, which chooses sums and deals out the rest.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from varuna.calibration.format import Calibration
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sums import HeldSums, MicroBatchLoss, RestOfStep, SectionSum, Spans, count, numbers_of, spans_of, union
from varuna.planner.choose import run_request
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.schedule.actions import Kind
from varuna.simulator.costs import PipelineCosts
from varuna.simulator.step import simulate

_WIDTH = 2
"""A micro-batch's loss and weight: calibrated jobs have no metrics."""


class _Added(NamedTuple):
    """A backward of a stage; seconds since the step's begin."""

    micro_batch: int
    """of the replica, from 0"""
    ends_s: float


class _Course(NamedTuple):
    """A step of one replica."""

    step_s: float
    added: tuple[tuple[_Added, ...], ...]
    """by stage, in the order of their ends"""
    reduced_s: tuple[float, ...]
    """by stage: when its sums are those of all replicas"""
    loss_s: tuple[float, ...]
    """by micro-batch: when its loss is known"""
    scale: float
    """what the plan predicts, over what is simulated"""


class BrokenSteps:
    """Steps of one job's plans, from begin to end; each is simulated once."""

    def __init__(self, job: JobFacts, calibration: Calibration) -> None:
        self._job, self._calibration = job, calibration
        self._costs: dict[Plan, PipelineCosts] = {}
        self._courses: dict[tuple[Plan, int], _Course] = {}

    def seconds(self, plan: Plan, work: Sequence[Spans]) -> float:
        """How long a step takes of which each replica runs some micro-batches."""
        return self._course(plan, max(map(count, work))).step_s

    def held(self, plan: Plan, rank: int, rest: RestOfStep | None, stopped_s: Sequence[float]) -> HeldSums | None:
        """What a rank says that it has of a step.

        Args:
            plan: of the generation.
            rank: in its grid.
            rest: what the rank had to do of the step, if not all.
            stopped_s: by replica, how far into the step it came.
        """
        replica, stage = plan.place_of(rank)
        mine = plan.micro_batches_of(replica) if rest is None else numbers_of(rest.work)
        course, until_s = self._course(plan, len(mine)), stopped_s[replica]
        everything: Spans = ((0, plan.micro_batches),)
        done = spans_of(mine[each.micro_batch] for each in course.added[stage] if each.ends_s <= until_s)
        if min(stopped_s) >= course.reduced_s[stage]:
            sums: Mapping[int, Spans] = dict.fromkeys(plan.sections_of(stage), everything)
        else:
            sums = self._with_inherited(plan.sections_of(stage), done, rest)
        losses: tuple[MicroBatchLoss, ...] = ()
        if stage == plan.stages - 1:
            known = (mine[number] for number, at_s in enumerate(course.loss_s) if at_s <= until_s)
            losses = tuple(MicroBatchLoss(micro_batch=number, values=(0.0,) * _WIDTH) for number in known)
            losses += () if rest is None else rest.losses
        sections = tuple(SectionSum(section=section, micro_batches=spans) for section, spans in sums.items() if spans)
        return HeldSums(micro_batch=plan.micro_batch, sections=sections, losses=losses) if sections else None

    def _with_inherited(self, sections: range, done: Spans, rest: RestOfStep | None) -> Mapping[int, Spans]:
        """By section: what was added here, and not by anyone before; and what the rank went on from."""
        if rest is None:
            return dict.fromkeys(sections, done)
        taken = {s: union(each.micro_batches for each in rest.taken if each.section == s) for s in sections}
        kept = {each.section: frozenset(numbers_of(each.micro_batches)) for each in rest.kept}
        new = {section: spans_of(j for j in numbers_of(done) if j not in kept[section]) for section in sections}
        return {section: union([new[section], taken[section]]) for section in sections}

    def _course(self, plan: Plan, micro_batches: int) -> _Course:
        """A replica's step of so many micro-batches; a whole one takes as long as the plan says."""
        known = self._courses.get((plan, micro_batches))
        if known is None:
            whole = len(plan.micro_batches_of(0))
            scale = None if micro_batches == whole else self._course(plan, whole).scale
            known = self._courses[plan, micro_batches] = self._simulated(plan, micro_batches, scale)
        return known

    def _simulated(self, plan: Plan, micro_batches: int, scale: float | None) -> _Course:
        trace = simulate(
            self._costs_of(plan),
            micro_batches=micro_batches,
            policy=plan.policy,
            stash_limits=[min(limit, micro_batches) for limit in plan.stash_limits],
            split_last=min(plan.split_last, micro_batches),
        )
        scale = plan.step_s / trace.step_s if scale is None else scale  # of long steps, the planner simulates a part
        added, loss_s = [], [0.0] * micro_batches
        for row in trace.rows:
            ended: list[_Added] = []
            for (_, kind, micro_batch), _, end_s in row:
                if kind in (Kind.BACKWARD, Kind.INPUT):  # what is left of halves is done before a rank stops
                    ended.append(_Added(micro_batch, end_s * scale))
                elif kind is Kind.FORWARD and row.stage == plan.stages - 1:
                    loss_s[micro_batch] = end_s * scale
            added.append(tuple(ended))
        reduced_s = tuple(at_s * scale for at_s in trace.reduced_s)
        return _Course(trace.step_s * scale, tuple(added), reduced_s, tuple(loss_s), scale)

    def _costs_of(self, plan: Plan) -> PipelineCosts:
        known = self._costs.get(plan)
        if known is None:
            request = run_request(
                self._job, workers=plan.workers, calibration=self._calibration, micro_batch=plan.micro_batch
            )
            figures = profile(request.calibration, plan.micro_batch)
            known = self._costs[plan] = pipeline_costs(figures, plan, gpus_per_vm=request.vm_size)
        return known
