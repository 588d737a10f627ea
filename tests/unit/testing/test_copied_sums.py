"""With several replicas, the sums of a lost worker are kept as its keeper has them: only what is newer runs again."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import varuna
from tests.depth import nightly
from tests.unit.testing import work
from tests.unit.testing.work import CAPTURES, OnceOthers, disturbed, went_back
from tests.waiting import wait_for
from varuna.core.plan import Plan
from varuna.core.sums import HeldSums, numbers_of
from varuna.engine.base.spans import Span
from varuna.engine.base.transport import Group
from varuna.engine.copies import sending
from varuna.engine.copies.keeping import KeptSums
from varuna.engine.copies.sending import CopiedStage, CopySender
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.sums import ResumedStep, Sums
from varuna.engine.worker import generation
from varuna.schedule.copy_pace import SumsPace
from varuna.testing import run
from varuna.testing.faults import Fault, Phase
from varuna.testing.ranks import Stages

STEPS, STEP, MICRO_BATCHES = 3, 1, 72


class Watched:
    """The sums that ranks of the first plan have in one step, and the copies that the keeper of one of them has.

    That one begins a backward only while a copy of some sums is wanted, so that copies are about as new as possible.
    """

    def __init__(self, owner: int) -> None:
        self.owner, self.stages, self.newest = owner, dict[int, Stage](), dict[int, Stage]()
        self._lock, self._is_first = threading.Lock(), True
        self._added: dict[int, set[int]] = defaultdict(set)  # by rank
        self._copied: dict[tuple[int, int], set[int]] = {}  # by thread of a keeper and section
        self.least_kept = -1
        """micro-batches that all sections had in sums of others, or in copies, when the owner was lost"""
        self.of_copies = 0
        """those that no other rank had, but for the copies"""

    def note_sender(self, rank: int, stage: Stage) -> None:
        """A rank's sums are copied from now on."""
        with self._lock:
            self.newest[rank] = stage
            if self._is_first:
                self.stages[rank] = stage

    def note_copy(self, held: HeldSums) -> None:
        """A copy is complete."""
        [copy] = held.copies
        with self._lock:
            if self._is_first:
                self._copied[threading.get_ident(), copy.section] = set(numbers_of(copy.micro_batches))

    def hear(self, span: Span) -> None:
        """Note what a rank has done; let the owner wait."""
        if span.name == "form" and span.index:
            self._is_first = False
        if not self._is_first or span.step != STEP or span.name != "B":
            return
        if span.phase == "end":
            with self._lock:
                self._added[span.rank].add(span.index)
        elif span.rank == self.owner:
            wait_for(lambda: self._is_wanted() or not self._is_first, 30)

    def _is_wanted(self) -> bool:
        stage = self.stages.get(self.owner)
        return stage is not None and stage.sums.are_wanted

    def lose(self) -> None:
        """The owner is lost now."""
        with self._lock:
            plan = self.stages[self.owner].plan
            mine = set(plan.micro_batches_of(plan.place_of(self.owner).replica))
            with_copies, without = (set(range(plan.micro_batches)) for _ in range(2))
            without_sums = {each for stage in self.stages.values() for each in stage.sums.without}
            for section in set(range(plan.sections)) - without_sums:
                others = set[int]().union(*(self._added[r] for r in plan.homes_of(section) if r != self.owner))
                copies = (found for (_, each), found in self._copied.items() if each == section)
                without &= others
                with_copies &= others.union(*(found & mine for found in copies))
            self.least_kept, self.of_copies = len(with_copies), len(with_copies - without)

    def added(self, rank: int) -> int:
        """Return the number of micro-batches that a rank has added."""
        return len(self._added[rank])


class Loss(Fault):
    """The owner is lost at a backward, once others have come far enough."""

    def __init__(self, watched: Watched, after: int, others: Mapping[int, int]) -> None:
        super().__init__(watched.owner, STEP, "B", None, after=after)
        self._watched, self._others = watched, others

    def is_here(self, span: Span) -> bool:
        """Wait for the others, if this is the place."""
        if not super().is_here(span):
            return False
        wait_for(lambda: all(self._watched.added(rank) >= least for rank, least in self._others.items()), 60)
        self._watched.lose()
        return True


class Another(Fault):
    """A second worker is lost as it begins a phase, once the first one is."""

    def __init__(self, first: Fault, rank: int, phase: Phase) -> None:
        super().__init__(rank, STEP, phase, None)
        self._first = first

    def is_here(self, span: Span) -> bool:
        """Not before."""
        return self._first.happened and super().is_here(span)


script = work.script(STEPS, MICRO_BATCHES)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made all the time."""
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Watched]:
    """Watches a run that loses a rank."""
    complete = KeptSums.complete

    def watched(owner: int) -> Watched:
        found = Watched(owner)

        class Noted(CopySender):
            def __init__(self, group: Group, keeper: int, copied: CopiedStage, **where: Any) -> None:
                if copied.stage is not None:
                    found.note_sender(where["rank"], copied.stage)
                super().__init__(group, keeper, copied, **where)

        def completes(kept: KeptSums, held: HeldSums, values: Any) -> None:
            complete(kept, held, values)
            if kept._step == STEP:
                found.note_copy(held)

        monkeypatch.setattr(generation, "CopySender", Noted)
        monkeypatch.setattr(KeptSums, "complete", completes)
        return found

    return watched


SHAPES: dict[str, Mapping[int, Stages]] = {
    "2x2": {4: 2, 3: 2, 2: 2, 1: 1},
    "1x2": {2: 1, 1: 1},
    "1x4": {4: 1, 3: 1, 2: 1},
    "3x3": {9: 3, 8: 3, 7: 3},
    "3x1+2x1": {5: (3, 2), 4: (3, 1), 3: (2, 1)},
}
OWNERS = {"2x2": (0, 3), "1x2": (1,), "1x4": (2,), "3x3": (4,), "3x1+2x1": (1, 4)}
AFTER = {"1x2": 30}
"""Backwards of the lost worker, by the shape of the plan; a stage with all sections needs many for a copy of each."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("shape", "owner"),
    [
        pytest.param(shape, owner, marks=() if (shape, owner) == ("1x4", 2) else pytest.mark.nightly)
        for shape, owners in OWNERS.items()
        for owner in owners
    ],
)
def test_what_was_copied_does_not_run_again(
    alone: tuple[float, ...], watch: Callable[[int], Watched], shape: str, owner: int
) -> None:
    """It would, without copies: nobody else has added the micro-batches of the lost worker's pipeline."""
    watched = watch(owner)
    outcome = disturbed(script, watched.hear, SHAPES[shape], [Loss(watched, AFTER.get(shape, 16), {})])
    assert outcome.plans[0] == shape
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)
    assert watched.of_copies > 0
    assert MICRO_BATCHES - outcome.kept[1] <= max(MICRO_BATCHES - watched.least_kept, len(SHAPES[shape]))


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"memory": varuna.Memory(shard_optimizer=True)}, 1e-6),
        ({"memory": varuna.Memory(offload_optimizer=True)}, 1e-6),
        ({"network": varuna.Network(reduction="bf16")}, 1e-3),
    ],
    ids=["shard", "offload", "bf16 sums"],
)
def test_copies_go_with_what_a_job_asks_for(
    watch: Callable[[int], Watched], options: Mapping[str, Any], near: float
) -> None:
    job = work.script(STEPS, MICRO_BATCHES, **options)
    undisturbed = run(job, captures=CAPTURES, workers=4, stages=2)
    watched = watch(3)
    outcome = disturbed(job, watched.hear, SHAPES["2x2"], [Loss(watched, 16, {})])
    assert outcome.losses == pytest.approx(undisturbed.losses, rel=near)
    assert watched.of_copies > 0
    assert outcome.kept[1] >= watched.least_kept


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("shape", "back"), [("1x4", False), ("2x2", True)])
def test_an_owner_and_its_keeper_die_together(
    alone: tuple[float, ...], watch: Callable[[int], Watched], shape: str, back: bool
) -> None:
    """That costs what was copied; and the run goes back only where nobody else has the state."""
    watched, both = watch(1), threading.Barrier(2)

    class Keeper(Fault):
        def on_span(self, span: Span) -> None:
            if (span.phase, span.rank, span.step, span.name) == ("begin", self.rank, STEP, "B") and not self.happened:
                both.wait(60)
                super().on_span(span)

    class Owner(Loss):
        def is_here(self, span: Span) -> bool:
            return super().is_here(span) and both.wait(60) >= 0

    keeper = {"1x4": 2, "2x2": 3}[shape]
    outcome = disturbed(script, watched.hear, SHAPES[shape], [Owner(watched, 16, {}), Keeper(keeper, STEP, "B", None)])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert went_back(outcome) == back


@pytest.mark.timeout(200)
@pytest.mark.parametrize("phase", ["form", *nightly("held", "barrier", "F")])
def test_a_keeper_dies_while_what_it_keeps_is_handed_over(
    alone: tuple[float, ...], watch: Callable[[int], Watched], phase: Phase
) -> None:
    """Whether or not the next generation has gone on from the copy, each micro-batch counts once."""
    watched = watch(1)
    loss = Loss(watched, 16, {})
    outcome = disturbed(script, watched.hear, SHAPES["1x4"], [loss, Another(loss, {"held": 2}.get(phase, 1), phase)])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert outcome.plans[-1] == "1x2"
    assert not went_back(outcome)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_copies_of_a_step_that_goes_on_have_what_it_went_on_from(
    alone: tuple[float, ...], watch: Callable[[int], Watched]
) -> None:
    """A second worker is lost in the same step, which the next plan has begun with sums of three."""
    watched = watch(1)
    loss = Loss(watched, 16, {})
    outcome = disturbed(
        script,
        watched.hear,
        SHAPES["1x4"],
        [
            loss,
            Another(loss, 0, "B"),
        ],
    )
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert outcome.plans == ("1x4", "1x3", "1x2")


class OnceCopied(Fault):
    """Rank 0 of the generation that goes on is lost, once all that it has inherited has a copy on rank 1."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(0, STEP, "B", None)
        self._watched, self._generation, self._copied = watched, 0, set[int]()
        self.ran: dict[int, set[int]] = defaultdict(set)
        """by generation: micro-batches that ran"""

    def on_span(self, span: Span) -> None:
        """A backward begins only while a copy is wanted: what is added meanwhile is little."""
        if span.name == "form":
            self._generation = max(self._generation, span.index)
        here = span.step == STEP and self._generation == 1
        if (span.name, span.phase) == ("F", "begin") and span.step == STEP:
            self.ran[self._generation].add(span.index)
        if here and (span.name, span.phase, span.rank) == ("kept-sum", "end", 1):
            self._copied.add(span.index)
        if here and (span.name, span.phase, span.rank) == ("B", "begin", 0) and not self.happened:
            wait_for(lambda: self._is_copied() or self._is_wanted(), 30)
            if self._is_copied():
                super().on_span(span)

    def _is_copied(self) -> bool:
        stage = self._watched.newest[0]
        return self._copied >= set(stage.sections) - set(stage.sums.without)

    def _is_wanted(self) -> bool:
        return self._watched.newest[0].sums.are_wanted


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_what_a_generation_goes_on_from_is_copied_at_once(
    alone: tuple[float, ...], watch: Callable[[int], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is, since steps are too short: so the first loss takes its sums along, and the second does not."""
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(0, 1000.0))
    watched, begun = watch(-1), list[frozenset[int]]()
    begin = Sums.__init__

    def begins(sums: Sums, buckets: Any, plan: Plan, inherited: ResumedStep | None, **rest: Any) -> None:
        begin(sums, buckets, plan, inherited, **rest)
        if inherited is not None and inherited.rest.taken and 0 in {each.source_rank for each in inherited.rest.taken}:
            begun.append(frozenset(numbers_of(inherited.rest.taken[0].micro_batches)))

    monkeypatch.setattr(Sums, "__init__", begins)
    second = OnceCopied(watched)
    others = OnceOthers(3, STEP, "B", 3, others=(0, 1, 2), done=4)
    outcome = disturbed(script, watched.hear, SHAPES["1x4"], [others, second])
    assert outcome.plans == ("1x4", "1x3", "1x2")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert len(begun[0]) >= 4
    assert not begun[0] & second.ran[2]
