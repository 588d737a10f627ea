"""Progress of each rank at any moment of a step, so that a loss costs what the survivors' sums lack.

One simulated pipeline stands for all that are cut alike. The state machine of a run judges what survivors then say they
hold: it chooses sums and deals out the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from varuna.calibration.format import Calibrations
from varuna.core.devices import equal_workers
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sums import (
    HeldSums,
    IndexSet,
    MicroBatchLoss,
    SectionSum,
    StepAssignment,
    count,
    joined,
    numbers_of,
    spans_of,
    union,
)
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import run_request
from varuna.planner.copy_costs import copies_take_s
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.schedule.actions import Kind
from varuna.schedule.copy_pace import copying_s, sums_pace, sums_pause_s
from varuna.simulator.costs import PipelineCosts
from varuna.simulator.step import simulate


class CopiedSum(NamedTuple):
    """A copy of a section's sum."""

    section: int
    taken_s: float
    """seconds since the step's begin; sums that were added by then are in it"""
    complete_s: float


def copied_sums(
    added_s: Sequence[float],
    sizes: Mapping[int, int],
    *,
    state_complete_s: float,
    link_bytes_per_s: float,
    step_s: float,
    goes_on: bool,
    until_s: float,
) -> Iterator[CopiedSum]:
    """Yield the copies of a stage's sums that are complete by ``until_s``, as ``engine.copies.sending`` makes them.

    A section's sum is taken when something was just added to it.

    Args:
        added_s: when micro-batches were added, ascending.
        sizes: bytes of each section's sums.
        state_complete_s: when the state's copy was.
        link_bytes_per_s: of the link to the keeper.
        step_s: how long the step takes.
        goes_on: something is in the sums from the beginning, so that the first round begins at once.
        until_s: when the owner or its keeper stopped.
    """
    size_bytes = sum(sizes.values())
    pace = sums_pace(step_s - state_complete_s, size_bytes, copying_s(size_bytes, link_bytes_per_s))
    now_s, position = state_complete_s + (0.0 if goes_on else pace.every_s), 0
    while now_s <= until_s:
        began_s = now_s
        for section, size in sizes.items():
            while position < len(added_s) and added_s[position] < now_s:
                position += 1
            if position == len(added_s):
                return
            taken_s = added_s[position]
            now_s = taken_s + copying_s(size, link_bytes_per_s)
            if now_s > until_s:
                return
            yield CopiedSum(section, taken_s, now_s)
        now_s += sums_pause_s(pace, now_s - began_s)


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
    """predicted time of a step over the simulated one"""


def _kind_of(plan: Plan, replica: int) -> int:
    """Return the number of a replica's cut among those of the plan."""
    return next(kind for kind, (replicas, _) in enumerate(plan.kinds) if replica in replicas)


class BrokenSteps:
    """Steps of one job's plans, from begin to end; each is simulated once."""

    def __init__(self, job: JobFacts, calibrations: Calibrations) -> None:
        self._job, self._calibrations = job, calibrations
        self._costs: dict[Plan, PipelineCosts] = {}
        self._longer: dict[Plan, float] = {}
        self._courses: dict[tuple[Plan, int, int], _Course] = {}

    def seconds(self, plan: Plan, work: Sequence[IndexSet]) -> float:
        """Return the seconds of a step in which each replica runs some micro-batches."""
        longest: dict[int, int] = {}
        for each, spans in enumerate(work):
            kind = _kind_of(plan, each)
            longest[kind] = max(longest.get(kind, 0), count(spans))
        return max(self._course(plan, number, kind).step_s for kind, number in longest.items()) * self.longer(plan)

    def longer(self, plan: Plan) -> float:
        """Return the ratio of a step's time with the copies made in it, if any are, to its time without them."""
        known = self._longer.get(plan)
        if known is None:
            cost_s = copies_take_s(plan, self._request(plan)) if plan.copies.are_made else 0.0
            known = self._longer[plan] = 1 + cost_s / plan.step_s if plan.step_s else 1.0
        return known

    def held(self, plan: Plan, rank: int, rest: StepAssignment | None, stopped_s: Sequence[float]) -> HeldSums | None:
        """Return the sums that a rank says it has of a step.

        Args:
            plan: of the generation.
            rank: in its grid.
            rest: what the rank had to do of the step, if not all.
            stopped_s: by replica, how far into the step it came.
        """
        replica, stage = plan.place_of(rank)
        sections = plan.sections_at(rank)
        mine = plan.micro_batches_of(replica) if rest is None else numbers_of(rest.work)
        course, until_s = self._course(plan, len(mine), _kind_of(plan, replica)), stopped_s[replica] / self.longer(plan)
        everything: IndexSet = ((0, plan.micro_batches),)
        # mine: number among the replica's own micro-batches -> number in the global batch
        done = spans_of(mine[each.micro_batch] for each in course.added[stage] if each.ends_s <= until_s)
        if min(stopped_s) / self.longer(plan) >= course.reduced_s[stage]:
            sums: Mapping[int, IndexSet] = dict.fromkeys(sections, everything)
        else:
            sums = self._with_inherited(sections, done, rest)
        losses = self._losses(plan, rank, mine, rest, course, until_s)
        held = tuple(SectionSum(section=section, micro_batches=spans) for section, spans in sums.items() if spans)
        return HeldSums(micro_batch=plan.micro_batch, sections=held, losses=losses) if held else None

    def copied(
        self, plan: Plan, rank: int, rest: StepAssignment | None, *, state_complete_s: float, until_s: float
    ) -> HeldSums | None:
        """Return the sums of a rank that its keeper has; None: nothing.

        Args:
            plan: of the generation.
            rank: whose sums they are.
            rest: what the rank had to do of the step, if not all.
            state_complete_s: when the copy of the rank's state was, if there is one, in seconds since the step's begin.
            until_s: likewise, when the rank, its keeper or its pipeline stopped.
        """
        replica, stage = plan.place_of(rank)
        mine = plan.micro_batches_of(replica) if rest is None else numbers_of(rest.work)
        course = self._course(plan, len(mine), _kind_of(plan, replica))
        longer = self.longer(plan)
        added_s = [each.ends_s * longer for each in course.added[stage]]
        sizes = {section: self._job.model.sections[section].summed_bytes for section in plan.sections_at(rank)}
        newest: dict[int, CopiedSum] = {}
        for copy in copied_sums(
            added_s,
            sizes,
            state_complete_s=state_complete_s,
            link_bytes_per_s=self._calibrations.first.across_vms.link.bytes_per_s,
            step_s=plan.step_s * longer,
            goes_on=rest is not None and bool(rest.taken),
            until_s=until_s,
        ):
            newest[copy.section] = copy
        parts = []
        for section, copy in newest.items():
            taken_s = copy.taken_s / longer
            done = spans_of(mine[each.micro_batch] for each in course.added[stage] if each.ends_s <= taken_s)
            spans = self._with_inherited(range(section, section + 1), done, rest)[section]
            losses = self._losses(plan, rank, mine, rest, course, taken_s)
            held = SectionSum(section=section, micro_batches=spans)
            if spans:
                parts.append(HeldSums(micro_batch=plan.micro_batch, sections=(), copies=(held,), losses=losses))
        return joined(parts)

    def _losses(
        self,
        plan: Plan,
        rank: int,
        mine: Sequence[int],
        rest: StepAssignment | None,
        course: _Course,
        until_s: float,
    ) -> tuple[MicroBatchLoss, ...]:
        """Return the losses that a rank knows: none but those of the last stage does."""
        if plan.sections_at(rank).stop != plan.sections:
            return ()
        known = (mine[number] for number, at_s in enumerate(course.loss_s) if at_s <= until_s)
        inherited = () if rest is None else rest.losses
        return (*(MicroBatchLoss(micro_batch=number, values=(0.0,) * _WIDTH) for number in known), *inherited)

    def _with_inherited(self, sections: range, done: IndexSet, rest: StepAssignment | None) -> Mapping[int, IndexSet]:
        """Return by section what was added here, and not before; and what the rank continued from."""
        if rest is None:
            return dict.fromkeys(sections, done)
        taken = {s: union(each.micro_batches for each in rest.taken if each.section == s) for s in sections}
        kept = {each.section: frozenset(numbers_of(each.micro_batches)) for each in rest.kept}
        # j: number of a micro-batch in the global batch; what the rank kept of it must not count twice
        new = {section: spans_of(j for j in numbers_of(done) if j not in kept[section]) for section in sections}
        return {section: union([new[section], taken[section]]) for section in sections}

    def _course(self, plan: Plan, micro_batches: int, kind: int = 0) -> _Course:
        """Return a replica's step of some micro-batches, by how it is cut; a whole one takes the plan's time."""
        known = self._courses.get((plan, micro_batches, kind))
        if known is None:
            whole = len(plan.micro_batches_of(0))
            scale = None if (micro_batches, kind) == (whole, 0) else self._course(plan, whole).scale
            alike = plan.as_if_all(plan.kinds[kind][1])
            known = self._courses[plan, micro_batches, kind] = self._simulated(alike, micro_batches, scale)
        return known

    def _simulated(self, plan: Plan, micro_batches: int, scale: float | None) -> _Course:
        trace = simulate(
            self._costs_of(plan),
            micro_batches=micro_batches,
            policy=plan.policy,
            stash_limits=[min(limit, micro_batches) for limit in plan.first.stash_limits],
            split_last=min(plan.first.split_last, micro_batches),
            empties=plan.first.empties,
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
            request = self._request(plan)
            figures = profile(request.calibration, plan.micro_batch)
            known = self._costs[plan] = pipeline_costs(figures, plan, gpus_per_vm=request.vm_size)
        return known

    def _request(self, plan: Plan) -> PlanRequest:
        workers = equal_workers(plan.workers)
        return run_request(self._job, workers=workers, calibrations=self._calibrations, micro_batch=plan.micro_batch)
