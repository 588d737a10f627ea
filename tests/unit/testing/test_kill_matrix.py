"""A worker dies at every kind of action, on every stage and replica: same losses, and only what nobody has runs again.

Each case is a phase and a shape: four workers as 2x2, or three with copies in place of replicas; unlike pipelines have
``test_unlike_pipelines``. In ``make nightly`` places are samples of those of nine workers; with SLOW=1, all places.
"""

import os
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import pytest

from tests.depth import by_depth
from tests.unit.testing import work
from tests.unit.testing.test_saved_sums import slow
from tests.unit.testing.work import Work, disturbed, went_back
from varuna.engine.base.spans import Span
from varuna.engine.copies import sending
from varuna.engine.worker import generation
from varuna.schedule.copy_pace import SumsPace
from varuna.testing import RunResult
from varuna.testing.faults import Fault, Phase

STEPS, STEP, MICRO_BATCHES, STAGES, REPLICAS = by_depth((3, 1, 8, 2, 2), (3, 1, 18, 3, 3))
WORKERS = STAGES * REPLICAS
SHAPES = {1: 1, 2: 2} | dict.fromkeys(range(STAGES, WORKERS + 1), STAGES)


class Place(NamedTuple):
    """The place in a step where a worker dies."""

    phase: Phase
    rank: int
    at_end: bool = False
    after: int = 0

    def __str__(self) -> str:
        return f"{self.phase}-{'end' if self.at_end else 'begin'}-{self.after}-on-{self.rank}"


class Death(Fault):
    """One that is counted; a second one only happens once another has."""

    def __init__(self, place: Place, done: Work, first: Fault | None = None) -> None:
        super().__init__(place.rank, STEP, place.phase, None, after=place.after, at_end=place.at_end)
        self._done, self._first = done, first
        self.lacking = 0
        """micro-batches of which some stage has no gradients any more"""

    def is_here(self, span: Span) -> bool:
        """Whether the worker dies now."""
        if (self._first is not None and not self._first.happened) or not super().is_here(span):
            return False
        self._done.lose(self.rank)
        self.lacking = self._done.lacking(STAGES, span.stage)
        return True


class Last(Place):
    """A worker dies there once all others have come as far."""


class LastDeath(Death):
    """Waits for the others."""

    def __init__(self, place: Place, done: Work, first: Fault | None = None) -> None:
        super().__init__(place, done, first)
        self._there, self._all_there = set[int](), threading.Event()

    def on_span(self, span: Span) -> None:
        """Note who is there; the others are let pass."""
        if (span.phase, span.step, span.name) == ("begin", STEP, self.phase):
            self._there.add(span.rank)
            if len(self._there) == WORKERS:
                self._all_there.set()
            if span.rank == self.rank:
                assert self._all_there.wait(60), f"only ranks {self._there} have come to {self.phase}"
        super().on_span(span)


script = work.script(STEPS, MICRO_BATCHES)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


def killed(*places: Place, shapes: Mapping[int, int] = SHAPES) -> tuple[RunResult, Work, list[Death]]:
    done = Work(STEP, MICRO_BATCHES)
    deaths: list[Death] = []
    for place in places:
        kind = LastDeath if isinstance(place, Last) else Death
        deaths.append(kind(place, done, deaths[-1] if deaths else None))
    return disturbed(script, done.hear, shapes, deaths), done, deaths


def check(alone: Sequence[float], outcome: RunResult, done: Work) -> int:
    """The losses; how many micro-batches of the step ran again in the newest generation that ran any of it."""
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    newest = max(done.ran)
    if newest == 0:
        return 0
    assert len(done.ran[newest]) == MICRO_BATCHES - outcome.kept[newest]
    return len(done.ran[newest])


def most_again(outcome: RunResult, done: Work, deaths: Sequence[Death]) -> int:
    """Count the micro-batches that nobody had any more; but no pipeline is left without work done."""
    return max(deaths[-1].lacking, int(outcome.plans[max(done.ran)].split("x")[1]))


def exists(place: Place) -> bool:
    """Whether a rank has that phase: the last stage keeps what B needs; only the first and the last have a tied one."""
    stage = place.rank % STAGES
    return not (place.phase == "R" and stage == STAGES - 1) and not (place.phase == "tied" and 0 < stage < STAGES - 1)


def sampled(fast: Sequence[Place], places: Iterable[Place], size: int) -> list[Place]:
    """Return these, or at night a sample of all places."""
    every = [place for place in places if exists(place)]
    return by_depth(list(fast), every if "SLOW" in os.environ else random.Random(0).sample(every, size))


def places(phases: Iterable[Phase], after: Iterable[int], ranks: int = WORKERS) -> list[Place]:
    every = product(phases, range(ranks), (False, True), after)
    return [Place(phase, rank, at_end, number) for phase, rank, at_end, number in every]


COMPUTING = [*places(("F", "R", "B", "send"), (0, 3)), *places(("reduce", "sum", "tied", "vote", "apply"), (0,))]
HANDING_OVER = [*places(("hold", "held", "form", "barrier"), (0,), 6), *places(("F", "B"), (0,), 6)]
COPYING = places(("keep", "send-kept", "kept", "copy-sum", "kept-sum"), (0,), STAGES)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "place",
    sampled([Place("B", 2, after=2), Place("sum", 1, at_end=True), Place("apply", 0)], COMPUTING, 3),
    ids=str,
)
def test_one_dies(alone: tuple[float, ...], place: Place) -> None:
    outcome, done, deaths = killed(place)
    again = check(alone, outcome, done)
    assert again <= most_again(outcome, done, deaths)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", by_depth([3], [3, 5]))
def test_one_dies_when_all_have_reduced_all_sums(alone: tuple[float, ...], rank: int) -> None:
    """Neither totals of tied gradients nor losses go with it: each pipeline runs one micro-batch, as it must."""
    outcome, done, _ = killed(Last("vote", rank))
    assert check(alone, outcome, done) == REPLICAS - 1, (outcome.plans, outcome.kept, outcome.warnings)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("place", sampled([Place("form", 1)], HANDING_OVER, 2), ids=str)
def test_another_dies_while_the_first_ones_work_is_handed_over(alone: tuple[float, ...], place: Place) -> None:
    """It dies when told to stop, when it has said what it holds, while the next generation forms, or when that runs."""
    outcome, done, deaths = killed(Place("B", by_depth(2, 7), after=by_depth(2, 3)), place)
    again = check(alone, outcome, done)
    assert again <= most_again(outcome, done, deaths)
    assert not went_back(outcome)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", range(5) if "SLOW" in os.environ else [1])
@pytest.mark.parametrize("at_end", [False, True])
def test_another_dies_while_state_and_sums_move(alone: tuple[float, ...], rank: int, at_end: bool) -> None:
    """3 x 2 becomes 2 x 2 with a spare, then 2 x 2."""
    shapes = {6: 3, 5: 2, 4: 2}
    outcome, done, _ = killed(Place("B", 4, after=3), Place("move", rank, at_end=at_end), shapes=shapes)
    check(alone, outcome, done)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("place", sampled([Place("kept", 2, at_end=True)], COPYING, 1), ids=str)
def test_one_dies_around_a_copy(alone: tuple[float, ...], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has one holder. Until the first copy of a state is complete, only the beginning is left."""
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))
    monkeypatch.setattr(generation, "checkpoint_every_s", lambda *_, **__: 0.0)  # after each step
    with slow(STEP):
        outcome, done, _ = killed(place, shapes={3: 3, 2: 2, 1: 1})
    if went_back(outcome):
        assert outcome.losses == pytest.approx(alone, rel=1e-6)
        assert place.phase in ("keep", "send-kept", "kept")
    else:
        check(alone, outcome, done)
