"""Short steps, whose time hangs on every turn: neighbours of the best plans are simulated as well.

A long step takes its bottleneck's time, which the balance has made as small as it can be. In a short one the order of
things decides, and a better network or more memory may lead to a plan that is a little worse (Graham's anomalies).
Other depths, one section moved over a boundary and another drain split find back to what was better.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.build import Builder, Built
from varuna.planner.predict import predict
from varuna.planner.splitting import with_best_split

_FACTORS = (1, 2, 3, 4)  # of in-flight depths; the last one where messages take longer than stages
_FORWARDS = 4_000  # simulated for a plan

_Move = tuple[tuple[int, ...], int]
"""First sections of the stages, and the factor of their in-flight depths."""


class Walk(NamedTuple):
    """Where a walk ended."""

    plan: Plan
    forwards: int
    """Simulated on the way."""


def polished(builder: Builder, built: Built, plan: Plan) -> Walk:
    """The best plan that a short walk finds.

    Args:
        builder: of the plan's micro-batch size.
        built: what the plan was simulated from.
        plan: with its simulated ``step_s``.
    """
    best = first = with_best_split(builder, plan)
    forwards = 4 * plan.stages * len(plan.micro_batches_of(0))  # for the drain split
    splits = (first.split_last, len(plan.micro_batches_of(0))) if plan.split_last else (0,)
    for split in dict.fromkeys(splits):  # which neighbours are better depends on it
        start = first.model_copy(update={"split_last": split})
        walker = _Walker(builder, built, start)
        while walker.step():
            pass
        forwards += walker.forwards
        if walker.plan is not start:
            best = min(best, with_best_split(builder, walker.plan), key=attrgetter("step_s"))
    return Walk(best, forwards)


class _Walker:
    def __init__(self, builder: Builder, here: Built, plan: Plan) -> None:
        self.plan = plan
        """Here, with the ``step_s`` that is to be beaten."""
        self.forwards = 0
        self._builder, self._here = builder, here
        self._tried = {(here.starts, here.factor)}

    def step(self) -> bool:
        """Go to the first neighbour that is better, if there is one within reach."""
        for move in _moves(self._here, sections=self.plan.sections, deepens=self._builder.may_keep):
            near = None if move in self._tried else self._builder.moved(self._here, *move)
            self._tried.add(move)
            if near is None or near.bound_s >= self.plan.step_s:
                continue
            if self.forwards > _FORWARDS:
                return False
            plan = self._builder.plan(near).model_copy(update={"split_last": self.plan.split_last})
            self.forwards += plan.stages * len(plan.micro_batches_of(0))
            plan = plan.model_copy(update={"step_s": predict(near.costs, plan).step_s})
            if plan.step_s < self.plan.step_s:
                self._here, self.plan = near, plan
                return True
        return False


def _moves(here: Built, *, sections: int, deepens: bool) -> Iterator[_Move]:
    """Other depths; then one boundary moved by one section."""
    starts, factor = here.starts, here.factor
    if deepens:
        yield from ((starts, other) for other in _FACTORS if other != factor)
    ends = (*starts[1:], sections)
    for k in range(1, len(starts)):
        for start in (starts[k] - 1, starts[k] + 1):
            if starts[k - 1] < start < ends[k]:
                yield (*starts[:k], start, *starts[k + 1 :]), factor
