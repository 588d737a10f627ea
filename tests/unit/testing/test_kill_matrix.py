"""A worker dies at every kind of action, on every stage and replica: same losses, and only what nobody has runs again.

A sample of the deaths runs here; SLOW=1 runs all of them.
"""

import os
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import pytest

import varuna
from tests.unit.engine.ranks import Dropping, Tokens, adamw
from tests.unit.testing.work import CAPTURES, Work, disturbed
from varuna.engine.base.spans import Span
from varuna.engine.copies import sending
from varuna.schedule.copy_pace import SumsPace
from varuna.testing import RunResult, run
from varuna.testing.faults import Fault, Phase

STEPS, STEP, MICRO_BATCHES, STAGES, REPLICAS = 3, 1, 18, 3, 3
WORKERS = STAGES * REPLICAS
SHAPES = {1: 1, 2: 2} | dict.fromkeys(range(3, WORKERS + 1), STAGES)


class Place(NamedTuple):
    """Where a worker dies."""

    phase: Phase
    rank: int
    at_end: bool = False
    after: int = 0

    def __str__(self) -> str:
        return f"{self.phase}-{'end' if self.at_end else 'begin'}-{self.after}-on-{self.rank}"


class Death(Fault):
    """One that is counted; a second one only happens once another has."""

    def __init__(self, place: Place, work: Work, first: Fault | None = None) -> None:
        super().__init__(place.rank, STEP, place.phase, None, after=place.after, at_end=place.at_end)
        self._work, self._first = work, first
        self.lacking = 0
        """micro-batches of which some stage has no gradients any more"""

    def is_here(self, span: Span) -> bool:
        """Whether the worker dies now."""
        if (self._first is not None and not self._first.happened) or not super().is_here(span):
            return False
        self._work.lose(self.rank)
        self.lacking = self._work.lacking(STAGES, span.stage)
        return True


class Last(Place):
    """A worker dies there once all others have come as far."""


class LastDeath(Death):
    """Waits for the others."""

    def __init__(self, place: Place, work: Work, first: Fault | None = None) -> None:
        super().__init__(place, work, first)
        self._there, self._all_there = set[int](), threading.Event()

    def hear(self, span: Span) -> None:
        """Note who is there; the others are let pass."""
        if (span.phase, span.step, span.name) == ("begin", STEP, self.phase):
            self._there.add(span.rank)
            if len(self._there) == WORKERS:
                self._all_there.set()
            if span.rank == self.rank:
                assert self._all_there.wait(60), f"only ranks {self._there} have come to {self.phase}"
        super().hear(span)


def script() -> list[int]:
    trainer = varuna.Trainer(Dropping, Tokens(padded=True), adamw, MICRO_BATCHES, micro_batch=1, clip_grad_norm=1.0)
    return [step.index for step in trainer.steps(STEPS)]


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return run(script, captures=CAPTURES).losses


def killed(*places: Place, shapes: Mapping[int, int] = SHAPES) -> tuple[RunResult, Work, list[Death]]:
    work = Work(STEP, MICRO_BATCHES)
    deaths: list[Death] = []
    for place in places:
        kind = LastDeath if isinstance(place, Last) else Death
        deaths.append(kind(place, work, deaths[-1] if deaths else None))
    return disturbed(script, work.hear, shapes, deaths), work, deaths


def check(alone: Sequence[float], outcome: RunResult, work: Work) -> int:
    """The losses; how many micro-batches of the step ran again in the newest generation that ran any of it."""
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    newest = max(work.ran)
    if newest == 0:
        return 0
    assert len(work.ran[newest]) == MICRO_BATCHES - outcome.kept[newest]
    return len(work.ran[newest])


def most_again(outcome: RunResult, work: Work, deaths: Sequence[Death]) -> int:
    """What nobody had any more; but no pipeline is left without work."""
    return max(deaths[-1].lacking, int(outcome.plans[max(work.ran)].split("x")[1]))


def went_back(outcome: RunResult) -> bool:
    return any("ROLLBACK" in text for text in outcome.warnings)


def exists(place: Place) -> bool:
    """Whether a rank of 3 x 3 has that phase: the last stage keeps what B needs; the middle one has nothing tied."""
    stage = place.rank % STAGES
    return (place.phase, stage) not in {("R", 2), ("tied", 1)}


def sampled(places: Iterable[Place], size: int) -> list[Place]:
    every = [place for place in places if exists(place)]
    return every if "SLOW" in os.environ else random.Random(0).sample(every, size)


def places(phases: Iterable[Phase], after: Iterable[int], ranks: int = WORKERS) -> list[Place]:
    every = product(phases, range(ranks), (False, True), after)
    return [Place(phase, rank, at_end, number) for phase, rank, at_end, number in every]


COMPUTING = [*places(("F", "R", "B", "send"), (0, 3)), *places(("reduce", "sum", "tied", "vote", "apply"), (0,))]
HANDING_OVER = [*places(("hold", "held", "form", "barrier"), (0,), 6), *places(("F", "B"), (0,), 6)]
COPYING = places(("copy", "kept", "copy-sum", "kept-sum"), (0,), STAGES)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("place", sampled(COMPUTING, 3), ids=str)
def test_one_dies(alone: tuple[float, ...], place: Place) -> None:
    outcome, work, deaths = killed(place)
    again = check(alone, outcome, work)
    assert again <= most_again(outcome, work, deaths)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [3, 5])
def test_one_dies_when_all_have_reduced_all_sums(alone: tuple[float, ...], rank: int) -> None:
    """Neither totals of tied gradients nor losses go with it: each pipeline runs one micro-batch, as it must."""
    outcome, work, _ = killed(Last("vote", rank))
    assert check(alone, outcome, work) == REPLICAS - 1, (outcome.plans, outcome.kept, outcome.warnings)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("place", sampled(HANDING_OVER, 2), ids=str)
def test_another_dies_while_the_first_ones_work_is_handed_over(alone: tuple[float, ...], place: Place) -> None:
    """When it is told to stop, when it has said what it holds, while the next generation forms, and when that runs."""
    outcome, work, deaths = killed(Place("B", 7, after=3), place)
    again = check(alone, outcome, work)
    assert again <= most_again(outcome, work, deaths)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", range(5) if "SLOW" in os.environ else [1])
@pytest.mark.parametrize("at_end", [False, True])
def test_another_dies_while_state_and_sums_move(alone: tuple[float, ...], rank: int, at_end: bool) -> None:
    """3 x 2 becomes 2 x 2 with a spare, then 2 x 2."""
    shapes = {6: 3, 5: 2, 4: 2}
    outcome, work, _ = killed(Place("B", 4, after=3), Place("move", rank, at_end=at_end), shapes=shapes)
    check(alone, outcome, work)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("place", sampled(COPYING, 1), ids=str)
def test_one_dies_around_a_copy(alone: tuple[float, ...], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has one holder. Until the first copy of a state is complete, only the beginning is left."""
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))
    outcome, work, _ = killed(place, shapes={3: 3, 2: 2, 1: 1})
    if went_back(outcome):
        assert outcome.losses == pytest.approx(alone, rel=1e-6)
        assert place.phase in ("copy", "kept")
    else:
        check(alone, outcome, work)
