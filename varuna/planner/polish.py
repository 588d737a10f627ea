"""Short steps, whose time depends on every action: neighbours of the best plans are simulated as well.

A long step takes its bottleneck's time, which the balance has made as small as it can be. In a short one the order of
things decides, and a better network or more memory may lead to a plan that is a little worse (Graham's anomalies).
Other depths, one section moved over a boundary and another drain split find back to what was better.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.build import Builder, BuiltPlan
from varuna.planner.effort import EFFORT
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import Simulated, simulated

_Move = tuple[tuple[int, ...], int]
"""First sections of the stages, and the factor of their in-flight depths."""


class Walk(NamedTuple):
    """The result of the local search around a plan."""

    best: Simulated
    forwards: int
    """Forwards that were simulated on the way."""


def polished(builder: Builder, built: BuiltPlan, given: Simulated, most_forwards: int) -> Walk:
    """The best plan that a short walk finds.

    Args:
        builder: of the plan's micro-batch size.
        built: what the plan was simulated from.
        given: the plan.
        most_forwards: that are simulated on the way.
    """
    best = with_best_order(given)
    first, longest = best.plan, len(given.plan.micro_batches_of(0))
    forwards = 4 * first.stages * longest  # for the drain split
    splits = (first.first.split_last, longest) if given.plan.first.split_last else (0,)
    for split in dict.fromkeys(splits):  # which neighbours are better depends on it
        start = first.each(split_last=split)
        walker = _Walker(builder, built, start, most_forwards)
        while walker.step():
            pass
        forwards += walker.forwards
        if walker.found is not None:
            best = min(best, with_best_order(walker.found), key=attrgetter("step_s"))
    return Walk(best, forwards)


class _Walker:
    def __init__(self, builder: Builder, here: BuiltPlan, plan: Plan, most_forwards: int) -> None:
        self.found: Simulated | None = None
        """The plan reached, unless it is the start."""
        self._plan = plan  # here, with the step_s that is to be beaten
        self.forwards, self._most_forwards = 0, most_forwards
        self._builder, self._here = builder, here
        self._tried = {(here.starts, here.factor)}

    def step(self) -> bool:
        """Go to the first neighbour that is better, if there is one within reach."""
        for move in _moves(self._here, sections=self._plan.sections, deepens=self._builder.may_keep):
            near = None if move in self._tried else self._builder.moved(self._here, *move)
            self._tried.add(move)
            if near is None or near.bound_s >= self._plan.step_s:
                continue
            if self.forwards > self._most_forwards:
                return False
            pipeline = self._plan.first
            plan = self._builder.plan(near).each(split_last=pipeline.split_last, empties=pipeline.empties)
            self.forwards += plan.stages * len(plan.micro_batches_of(0))
            tried = simulated(near.costs, plan)
            if tried.step_s < self._plan.step_s:
                self._here, self._plan, self.found = near, tried.plan, tried
                return True
        return False


def _moves(here: BuiltPlan, *, sections: int, deepens: bool) -> Iterator[_Move]:
    """Neighbours: other depths, then one boundary moved by one section."""
    starts, factor = here.starts, here.factor
    if deepens:
        yield from ((starts, other) for other in EFFORT.factors if other != factor)
    ends = (*starts[1:], sections)
    for k in range(1, len(starts)):
        for start in (starts[k] - 1, starts[k] + 1):
            if starts[k - 1] < start < ends[k]:
                yield (*starts[:k], start, *starts[k + 1 :]), factor
