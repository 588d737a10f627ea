"""Best first: a guess at every shape is refined into a plan with a bound, and then simulated, only while it may win."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter, itemgetter

from varuna.core.plan import Plan
from varuna.planner.build import Builder, BuiltPlan, Misfit
from varuna.planner.estimate import Depth, Guess, Guesser, Shape
from varuna.planner.polish import polished
from varuna.planner.pricing.predict import Simulated, simulated
from varuna.planner.request import PlanRequest
from varuna.planner.split_last import with_best_split

_OPTIMISM = 0.97  # guesses may be a little above what the shape becomes
_SPARE = 4_000  # forwards: until this many are simulated, plans that should lose are tried too
_MOST = 60_000  # beyond, the best so far is good enough: bounds that lie low on odd networks must not cost minutes
_SURPRISE = 1.2  # promises that much above the best plan are not
_OTHERS = 0.95  # what other depths of a shape may take, against the likely best ones
_NEAR = 1.35  # plans that may become the best by a few moves
_WALKED = 16_000  # forwards, for all of them together
_ANOMALY = 0.99  # other depths of a shape must promise this much to be simulated as well


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The result of a search."""

    best: tuple[Simulated, ...]
    """Plans, best first, one for each depth."""
    bounded: tuple[BuiltPlan, ...]
    """Plans whose bounds cannot win; one for each shape."""
    guessed: frozenset[Depth]
    """Depths that were not even built for at least one D."""
    misfits: tuple[Misfit, ...]


def search(
    request: PlanRequest, builders: dict[int, Builder], guessers: dict[int, Guesser], depths: Sequence[Depth]
) -> FoundPlan:
    """Refine until the best plans of ``request.wanted`` depths are known.

    Args:
        request: model, workers, and what the user fixed.
        builders: by micro-batch size.
        guessers: likewise.
        depths: all depths that may fit.
    """
    return _Search(request, builders, guessers, depths).run()


@dataclass(frozen=True, slots=True)
class _Others:
    """Other depths of a shape, not built yet."""

    built: BuiltPlan


_Start = tuple[BuiltPlan, Simulated]
"""What a plan was built from, and the simulated plan."""

_Entry = Depth | Guess | BuiltPlan | _Others | Plan


class _Search:
    def __init__(
        self,
        request: PlanRequest,
        builders: dict[int, Builder],
        guessers: dict[int, Guesser],
        depths: Sequence[Depth],
    ) -> None:
        self._request = request
        self._builders, self._guessers = builders, guessers
        self._order = count()
        self._queue: list[tuple[float, int, _Entry]] = [
            (guessers[depth.micro_batch].least_score(depth.stages) * _OPTIMISM, next(self._order), depth)
            for depth in depths
        ]
        heapify(self._queue)
        self._best: dict[Shape, Simulated] = {}  # by shape
        self._origins: dict[Shape, BuiltPlan] = {}  # of those plans
        self._tried: dict[Shape, list[tuple[BuiltPlan, Simulated]]] = {}  # of short steps
        self._misfits: list[Misfit] = []
        self._spent = 0  # forwards simulated

    def run(self) -> FoundPlan:
        ranked: set[int] = set()
        best_score = float("inf")
        while self._queue:
            score, _, entry = heappop(self._queue)
            is_enough = len(ranked) >= self._request.wanted or (self._spent > _MOST and bool(self._best))
            if is_enough and (score > best_score * _SURPRISE or self._spent > _SPARE):
                heappush(self._queue, (score, next(self._order), entry))
                break
            if _depth(entry) in ranked and not is_enough:  # with another D or m it is slower
                continue
            if isinstance(entry, Depth):
                for guess in self._guessers[entry.micro_batch].guesses(entry.stages):
                    self._push(guess.shape, guess.step_s * _OPTIMISM, guess)
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
        self._polish()
        return self._found()

    def _polish(self) -> None:
        """Walk on from the short plans that are near the best, the best first; then from those that lean otherwise.

        Which of the latter is best shows only with its drain split: they are slower without.
        """
        scores = {shape: self._plan_score(best.plan) for shape, best in self._best.items()}
        near = _NEAR * min(scores.values(), default=0.0)
        shapes = [shape for shape, score in sorted(scores.items(), key=itemgetter(1)) if score <= near]
        starts = {shape: (self._origins[shape], self._best[shape]) for shape in shapes if shape in self._tried}
        self._walk(starts.values())
        self._walk(self._leaning_otherwise(starts))

    def _leaning_otherwise(self, starts: dict[Shape, _Start]) -> Iterator[_Start]:
        for shape, (built, _) in starts.items():
            tried = [
                (other, with_best_split(start)) for other, start in self._tried[shape] if other.leans != built.leans
            ]
            if tried:
                yield min(tried, key=lambda start: start[1].step_s)

    def _walk(self, starts: Iterable[_Start]) -> None:
        left = _WALKED
        for built, start in starts:
            walk = polished(self._builders[built.shape.micro_batch], built, start)
            self._best[built.shape] = min(self._best[built.shape], walk.best, key=attrgetter("step_s"))
            left -= walk.forwards
            if left <= 0:
                break

    def _found(self) -> FoundPlan:
        plans: dict[int, Simulated] = {}
        for best in sorted(self._best.values(), key=lambda best: self._plan_score(best.plan)):
            plans.setdefault(best.plan.stages, best)
        queued = (entry for _, _, entry in sorted(self._queue, key=lambda item: item[:2]))
        rest = [entry for entry in queued if _depth(entry) not in plans]
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
        if isinstance(outcome, Misfit):
            self._misfits.append(outcome)
        else:
            self._push(outcome.shape, outcome.promise_s, outcome)
            others_s = outcome.unlimited_s
            if not outcome.is_short:
                others_s = min(outcome.promise_s * _OTHERS, others_s)
            self._push(outcome.shape, others_s, _Others(outcome))

    def _simulate(self, built: BuiltPlan, score: float) -> None:
        known = self._best.get(built.shape)
        slack = 1.0 if built.is_short else _ANOMALY
        if known is not None and score > slack * self._plan_score(known.plan):
            return
        plan = self._builders[built.shape.micro_batch].plan(built)
        if not built.leans:
            self._spent += plan.stages * min(len(plan.micro_batches_of(0)), 4 * plan.stages)
        tried = simulated(built.costs, plan)
        if built.is_short:
            self._tried.setdefault(built.shape, []).append((built, tried))
        if known is None or tried.step_s < known.step_s:
            self._best[built.shape] = tried
            self._origins[built.shape] = built
            self._push(built.shape, tried.step_s, tried.plan)

    def _unseen(self, entries: Iterator[BuiltPlan]) -> Iterator[BuiltPlan]:
        """Yield one entry for each shape that has no plan yet."""
        seen = set(self._best)
        for built in entries:
            if built.shape not in seen:
                seen.add(built.shape)
                yield built

    def _push(self, shape: Shape, step_s: float, entry: _Entry) -> None:
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
