"""Best first: a guess at every shape is refined into a plan with a bound, and then simulated, only while it may win."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.build import Builder, BuiltPlan, OutOfMemory
from varuna.planner.effort import EFFORT, Effort
from varuna.planner.estimate import Depth, Guess, Guesser, Shape
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
        start = first.with_each_pipeline(split_last=split)
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
            plan = self._builder.plan(near).with_each_pipeline(split_last=pipeline.split_last, empties=pipeline.empties)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The result of a search."""

    best: tuple[Simulated, ...]
    """Plans, best first, one for each depth."""
    bounded: tuple[BuiltPlan, ...]
    """Plans whose bounds cannot win; one for each shape."""
    guessed: frozenset[Depth]
    """Depths that were not even built for at least one D."""
    misfits: tuple[OutOfMemory, ...]


def search(
    request: PlanRequest,
    builders: dict[int, Builder],
    guessers: dict[int, Guesser],
    depths: Sequence[Depth],
    effort: Effort,
) -> FoundPlan:
    """Refine until the best plans of ``request.wanted`` depths are known.

    Args:
        request: model, workers, and what the user fixed.
        builders: by micro-batch size.
        guessers: likewise.
        depths: all depths that may fit.
        effort: how far walks go.
    """
    return _Search(request, builders, guessers, depths, effort).run()


@dataclass(frozen=True, slots=True)
class _Others:
    """Other depths of a shape, not built yet."""

    built: BuiltPlan


@dataclass(frozen=True, slots=True)
class _Start:
    """A plan of a short step, whose neighbours may be better."""

    built: BuiltPlan
    tried: Simulated


_Entry = Depth | Guess | BuiltPlan | _Others | Plan


class _Search:
    def __init__(
        self,
        request: PlanRequest,
        builders: dict[int, Builder],
        guessers: dict[int, Guesser],
        depths: Sequence[Depth],
        effort: Effort,
    ) -> None:
        self._request, self._effort = request, effort
        self._builders, self._guessers = builders, guessers
        self._order = count()
        self._queue: list[tuple[float, int, _Entry | _Start]] = [
            (guessers[depth.micro_batch].least_score(depth.stages) * EFFORT.optimism, next(self._order), depth)
            for depth in depths
        ]
        heapify(self._queue)
        self._best: dict[Shape, Simulated] = {}  # by shape
        self._simulated: dict[Shape, Simulated] = {}  # the best that nobody has walked on from
        self._starts: dict[tuple[Shape, bool], _Start] = {}  # the best by shape, and whether it leans
        self._misfits: list[OutOfMemory] = []
        self._beaten: list[_Entry] = []  # by the best plans so far, in the order of their scores
        self._spent = 0  # forwards simulated
        self._walked = {False: 0, True: 0}  # likewise on walks, from plans that lean or not

    def run(self) -> FoundPlan:
        ranked: set[int] = set()
        best_score = float("inf")
        while self._queue:
            score, _, entry = heappop(self._queue)
            is_enough = len(ranked) >= self._request.wanted or (
                self._spent > EFFORT.most_forwards and bool(self._simulated)
            )
            if isinstance(entry, _Start):
                self._walk(entry, is_near=score <= best_score * EFFORT.walked_within)
                continue
            if is_enough and (score > best_score * EFFORT.surprise or self._spent > EFFORT.spare_forwards):
                self._beaten.append(entry)
                continue
            if _depth(entry) in ranked and not is_enough:  # with another D or m it is slower
                continue
            if isinstance(entry, Depth):
                for guess in self._guessers[entry.micro_batch].guesses(entry.stages):
                    self._push(guess.shape, guess.step_s * EFFORT.optimism, guess)
            elif isinstance(entry, Guess):
                self._build(entry)
            elif isinstance(entry, _Others):
                for other in self._builders[entry.built.shape.micro_batch].others(entry.built):
                    self._push(other.shape, other.promise_s, other)
            elif isinstance(entry, BuiltPlan):
                self._simulate(entry, score)
            elif self._best[_shape(entry)].plan is entry:
                ranked.add(entry.stages)
                best_score = min(best_score, score)
        return self._found()

    def _walk(self, start: _Start, *, is_near: bool) -> None:
        """Go on to neighbours from the best plan of its shape that leans as it does, if it is near the best of all."""
        shape, leans = family = start.built.shape, start.built.leans
        if self._starts[family] is not start:
            return
        best = start.tried
        if is_near and self._walked[leans] < self._effort.walked_forwards:
            builder, most_forwards = self._builders[shape.micro_batch], self._effort.forwards_of_a_walk
            walk = polished(builder, start.built, start.tried, most_forwards)
            self._walked[leans] += walk.forwards
            best = walk.best
        self._offer(best, start.tried.step_s)

    def _offer(self, found: Simulated, from_s: float) -> None:
        """Rank a plan, if it is the best of its shape so far, by the step time ``from_s`` that led to it."""
        shape = _shape(found.plan)
        known = self._best.get(shape)
        if known is None or found.step_s < known.step_s:
            self._best[shape] = found
            self._push(shape, from_s, found.plan)

    def _found(self) -> FoundPlan:
        plans: dict[int, Simulated] = {}
        for best in sorted(self._best.values(), key=lambda best: self._plan_score(best.plan)):
            plans.setdefault(best.plan.stages, best)
        rest = [entry for entry in self._beaten if _depth(entry) not in plans]
        return FoundPlan(
            best=tuple(plans.values()),
            bounded=tuple(self._unseen(entry for entry in rest if isinstance(entry, BuiltPlan))),
            guessed=frozenset(
                Depth(entry.shape.stages, entry.shape.micro_batch) if isinstance(entry, Guess) else entry
                for entry in rest
                if isinstance(entry, Guess | Depth)
            ),
            misfits=tuple(self._misfits),
        )

    def _build(self, guess: Guess) -> None:
        outcome = self._builders[guess.shape.micro_batch].first(guess)
        if isinstance(outcome, OutOfMemory):
            self._misfits.append(outcome)
        else:
            self._push(outcome.shape, outcome.promise_s, outcome)
            others_s = outcome.unlimited_s
            if not outcome.is_short:
                others_s = min(outcome.promise_s * EFFORT.others, others_s)
            self._push(outcome.shape, others_s, _Others(outcome))

    def _simulate(self, built: BuiltPlan, score: float) -> None:
        known = self._simulated.get(built.shape)
        slack = 1.0 if built.is_short else EFFORT.anomaly
        if known is not None and score > slack * self._plan_score(known.plan):
            return
        plan = self._builders[built.shape.micro_batch].plan(built)
        if not built.leans:
            self._spent += plan.stages * min(len(plan.micro_batches_of(0)), 4 * plan.stages)
        tried = simulated(built.costs, plan)
        if known is None or tried.step_s < known.step_s:
            self._simulated[built.shape] = tried
        if not built.is_short:
            self._offer(tried, tried.step_s)
            return
        family = built.shape, built.leans
        if family not in self._starts or tried.step_s < self._starts[family].tried.step_s:
            start = self._starts[family] = _Start(built, tried)
            self._push(built.shape, tried.step_s, start)

    def _unseen(self, entries: Iterator[BuiltPlan]) -> Iterator[BuiltPlan]:
        """Yield one entry for each shape that has no plan yet."""
        seen = set(self._best)
        for built in entries:
            if built.shape not in seen:
                seen.add(built.shape)
                yield built

    def _push(self, shape: Shape, step_s: float, entry: _Entry | _Start) -> None:
        heappush(self._queue, (self._score(shape.stages * shape.replicas, step_s), next(self._order), entry))

    def _plan_score(self, plan: Plan) -> float:
        return self._score(plan.workers, plan.step_s)

    def _score(self, workers: int, step_s: float) -> float:
        return self._request.score(workers, step_s)


def _depth(entry: _Entry) -> int:
    if isinstance(entry, Depth | Plan):
        return entry.stages
    return (entry.built if isinstance(entry, _Others) else entry).shape.stages


def _shape(plan: Plan) -> Shape:
    return Shape(plan.stages, plan.replicas, plan.micro_batch)
