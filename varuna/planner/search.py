"""The search for the best equal pipelines: bound all shapes, simulate the best, walk to neighbours, rank.

docs/planning.md has its words: guess, bound, promise, factor, front-loading, walk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.build import Builder, BuiltPlan, OutOfMemory
from varuna.planner.effort import EFFORT, Effort
from varuna.planner.estimate import Depth, Guess, Shape
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import Simulated, simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The plans that a search found, and what it left out."""

    best: tuple[Simulated, ...]
    """Plans, best first, one for each depth."""
    bounded: tuple[BuiltPlan, ...]
    """Plans whose bounds cannot win; one for each shape."""
    guessed: frozenset[Depth]
    """Depths that were not even built for at least one D."""
    misfits: tuple[OutOfMemory, ...]


@dataclass(frozen=True, slots=True)
class _Others:
    """Other depths of a shape, not built yet."""

    built: BuiltPlan

    @property
    def shape(self) -> Shape:
        return self.built.shape


class _Start(NamedTuple):
    """A plan of a short step, whose neighbours may be better."""

    tried: Simulated
    built: BuiltPlan


_Entry = Depth | Guess | BuiltPlan | _Others | Plan


class Search:
    """Refines what promises most until the best plans of ``request.wanted`` depths are known."""

    def __init__(
        self, request: PlanRequest, builders: Mapping[int, Builder], depths: Sequence[Depth], effort: Effort
    ) -> None:
        """Begin with nothing but the least scores of depths.

        Args:
            request: model, workers, and what the user fixed.
            builders: by micro-batch size.
            depths: all depths that may fit.
            effort: how far walks go.
        """
        self._request, self._builders, self._effort = request, builders, effort
        self._order = count()
        self._queue: list[tuple[float, int, _Entry]] = []  # scores that nothing of the entry can be below, or hardly
        for depth in depths:
            score = builders[depth.micro_batch].guesser.least_score(depth.stages) * EFFORT.optimism
            self._queue.append((score, next(self._order), depth))
        heapify(self._queue)
        self._best: dict[Shape, Simulated] = {}
        self._starts: dict[tuple[Shape, bool], _Start] = {}  # the best by shape, and whether it is front-loaded
        self._misfits: list[OutOfMemory] = []
        self._beaten: list[_Entry] = []  # by the best plans so far, in the order of their scores
        self._spent = 0  # forwards simulated

    def run(self) -> SearchResult:
        """Search; once."""
        self._walk(within=EFFORT.walked_within * self._simulate_best())
        plans: dict[int, Simulated] = {}
        for best in sorted(self._best.values(), key=self._score_of):
            plans.setdefault(best.plan.stages, best)
        rest = [entry for entry in self._beaten if _depth(entry) not in plans]
        return SearchResult(
            best=tuple(plans.values()),
            bounded=tuple(self._unseen(entry for entry in rest if isinstance(entry, BuiltPlan))),
            guessed=frozenset(
                Depth(entry.shape.stages, entry.shape.micro_batch) if isinstance(entry, Guess) else entry
                for entry in rest
                if isinstance(entry, Guess | Depth)
            ),
            misfits=tuple(self._misfits),
        )

    def _simulate_best(self) -> float:
        """Refine what promises most, until the best plans beat all the rest; returns the score of the best."""
        ranked: set[int] = set()
        best_score = float("inf")
        while self._queue:
            score, _, entry = heappop(self._queue)
            is_enough = len(ranked) >= self._request.wanted or (self._spent > EFFORT.most_forwards and self._best)
            if is_enough and (score > best_score * EFFORT.surprise or self._spent > EFFORT.spare_forwards):
                self._beaten.append(entry)
            elif _depth(entry) in ranked and not is_enough:
                continue  # with another D or m it is slower
            elif isinstance(entry, Depth):
                for guess in self._builders[entry.micro_batch].guesser.guesses(entry.stages):
                    self._push(guess.shape, guess.step_s * EFFORT.optimism, guess)
            elif isinstance(entry, Guess):
                self._build(entry)
            elif isinstance(entry, _Others):
                for other in self._builders[entry.shape.micro_batch].others(entry.built):
                    self._push(other.shape, other.promise_s, other)
            elif isinstance(entry, BuiltPlan):
                self._simulate(entry, score)
            elif self._best[_shape(entry)].plan is entry:
                ranked.add(entry.stages)
                best_score = min(best_score, score)
        return best_score

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
        known = self._best.get(built.shape)
        slack = 1.0 if built.is_short else EFFORT.anomaly
        if known is not None and score > slack * self._score_of(known):
            return
        plan = self._builders[built.shape.micro_batch].plan(built)
        if not built.front_loaded:
            self._spent += plan.stages * min(len(plan.micro_batches_of(0)), 4 * plan.stages)
        tried = simulated(built.costs, plan)
        family = built.shape, built.front_loaded
        if built.is_short and (family not in self._starts or tried.step_s < self._starts[family].tried.step_s):
            self._starts[family] = _Start(tried, built)
        if known is None or tried.step_s < known.step_s:
            self._best[built.shape] = tried
            self._push(built.shape, tried.step_s, tried.plan)

    def _walk(self, within: float) -> None:
        """Go on to neighbours from plans of short steps, the best first, that have a score within this."""
        walked = {False: 0, True: 0}  # forwards, from front-loaded plans or not
        for start in sorted(self._starts.values(), key=lambda start: self._score_of(start.tried)):
            shape, front_loaded = start.built.shape, start.built.front_loaded
            if self._score_of(start.tried) <= within and walked[front_loaded] < self._effort.walked_forwards:
                builder, most_forwards = self._builders[shape.micro_batch], self._effort.forwards_of_a_walk
                best, forwards = walk(builder, start.built, start.tried, most_forwards)
                walked[front_loaded] += forwards
                self._best[shape] = min(self._best[shape], best, key=attrgetter("step_s"))

    def _unseen(self, entries: Iterator[BuiltPlan]) -> Iterator[BuiltPlan]:
        """Yield one entry for each shape that has no plan yet."""
        seen = set(self._best)
        for built in entries:
            if built.shape not in seen:
                seen.add(built.shape)
                yield built

    def _push(self, shape: Shape, step_s: float, entry: _Entry) -> None:
        score = self._request.score(shape.stages * shape.replicas, step_s)
        heappush(self._queue, (score, next(self._order), entry))

    def _score_of(self, found: Simulated) -> float:
        return self._request.score(found.plan.workers, found.step_s)


def _depth(entry: _Entry) -> int:
    return entry.stages if isinstance(entry, Depth | Plan) else entry.shape.stages


def _shape(plan: Plan) -> Shape:
    return Shape(plan.stages, plan.replicas, plan.micro_batch)


# -- neighbours ----------------------------------------------------------------------------------------------------


def walk(builder: Builder, built: BuiltPlan, given: Simulated, most_forwards: int) -> tuple[Simulated, int]:
    """The best plan near a plan, and the forwards that were simulated to find it.

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
        reached, more = _downhill(builder, built, first.with_each_pipeline(split_last=split), most_forwards)
        forwards += more
        if reached is not None:
            best = min(best, with_best_order(reached), key=attrgetter("step_s"))
    return best, forwards


def _downhill(builder: Builder, here: BuiltPlan, plan: Plan, most_forwards: int) -> tuple[Simulated | None, int]:
    """Go to the first better neighbour, again and again; returns the plan reached, if any, and forwards simulated."""
    reached, forwards, seen = None, 0, {(here.starts, here.factor)}
    moves = _moves(here, sections=plan.sections, deepens=builder.may_keep)
    while (move := next(moves, None)) is not None:
        near = None if move in seen else builder.moved(here, *move)
        seen.add(move)
        if near is None or near.bound_s >= plan.step_s:
            continue
        if forwards > most_forwards:
            break
        order = {"split_last": plan.first.split_last, "empties": plan.first.empties}
        tried = simulated(near.costs, builder.plan(near).with_each_pipeline(**order))
        forwards += plan.stages * len(tried.plan.micro_batches_of(0))
        if tried.step_s < plan.step_s:
            here, plan, reached = near, tried.plan, tried
            moves = _moves(here, sections=plan.sections, deepens=builder.may_keep)
    return reached, forwards


def _moves(here: BuiltPlan, *, sections: int, deepens: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Neighbours, as first sections of stages and factor: other depths, then one boundary moved by one section."""
    starts, factor = here.starts, here.factor
    if deepens:
        yield from ((starts, other) for other in EFFORT.factors if other != factor)
    ends = (*starts[1:], sections)
    for k in range(1, len(starts)):
        for start in (starts[k] - 1, starts[k] + 1):
            if starts[k - 1] < start < ends[k]:
                yield (*starts[:k], start, *starts[k + 1 :]), factor
