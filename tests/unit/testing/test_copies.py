"""Where each section has one holder, the loss of a worker costs the step in flight and no more: same losses."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

import varuna
from tests.unit.engine.ranks import Dropping, Tokens, adamw
from varuna.engine.base.spans import Span, subscribe
from varuna.engine.copies import sending, wire
from varuna.testing import RunResult, run
from varuna.testing.faults import Fault, Phase

STEPS, MICRO_BATCHES = 3, 32


class Waiting(Fault):
    """A worker is lost in the middle of a phase's work, once something else has happened."""

    def __init__(self, rank: int, step: int, phase: Phase, ready: Callable[[], bool], often: int = 0) -> None:
        super().__init__(rank, step, phase, None)
        self._left, self._ready = often, ready

    def hear(self, span: Span) -> None:
        """Let it pass at first."""
        if (span.phase, span.rank, span.step, span.name) != ("begin", self.rank, self.step, self.phase):
            return
        if self._left:
            self._left -= 1
            return
        assert self.happened or self._ready(), "it did not happen"
        super().hear(span)


class Kept:
    """Which copies are complete: of a step's state, and on which rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: set[tuple[int, int]] = set()
        self._voted: set[tuple[int, int]] = set()
        self.sums: Counter[tuple[int, int, int]] = Counter()
        """by keeper, step and section"""

    def hear(self, span: Span) -> None:
        """Note it."""
        if (span.name, span.phase) == ("kept", "end"):
            with self._changed:
                self._seen.add((span.rank, span.step))
                self._changed.notify_all()
        if (span.name, span.phase) == ("apply", "begin"):
            with self._changed:
                self._voted.add((span.rank, span.step))
                self._changed.notify_all()
        if (span.name, span.phase) == ("kept-sum", "end"):
            self.sums[span.rank, span.step, span.index] += 1

    def on(self, *ranks: int, step: int) -> Callable[[], bool]:
        """Wait until these ranks have complete copies of a step's state."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: {(rank, step) for rank in ranks} <= self._seen, 20)

        return wait

    def voted(self, *ranks: int, step: int) -> Callable[[], bool]:
        """Wait until these ranks have the result of a step's vote."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: {(rank, step) for rank in ranks} <= self._voted, 20)

        return wait


def script() -> list[int]:
    trainer = varuna.Trainer(Dropping, Tokens(padded=True), adamw, MICRO_BATCHES, micro_batch=1, clip_grad_norm=1.0)
    return [step.index for step in trainer.steps(STEPS)]


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return run(script).losses


@pytest.fixture
def kept() -> Kept:
    return Kept()


def disturbed(kept: Kept, faults: Sequence[Fault], workers: int = 3) -> RunResult:
    undo = subscribe(kept.hear)
    try:
        return run(script, workers=workers, stages={each: each for each in range(1, workers + 1)}, faults=faults)
    finally:
        undo()


def went_back(outcome: RunResult) -> bool:
    return any("ROLLBACK" in text for text in outcome.warnings)


@pytest.mark.timeout(200)
def test_two_workers_die_in_the_middle_of_steps(kept: Kept, alone: tuple[float, ...]) -> None:
    """Their neighbours have copies of what only they had; the second death comes in the first step of a new plan."""
    faults = [Waiting(1, 1, "B", kept.on(2, step=1), 15), Waiting(0, 2, "F", kept.on(1, step=2), 20)]
    outcome = disturbed(kept, faults, workers=4)
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
def test_a_worker_dies_while_the_next_plan_forms(kept: Kept, alone: tuple[float, ...]) -> None:
    """The first one's sections are on their way from their copy, and the second one's copy is still there, too."""
    faults = [Waiting(1, 2, "B", kept.on(2, 0, step=2), 5), Waiting(2, 2, "form", lambda: True)]
    outcome = disturbed(kept, faults, workers=4)
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
def test_an_owner_and_its_keeper_die_together(kept: Kept, alone: tuple[float, ...]) -> None:
    both = threading.Barrier(2)

    def together() -> bool:
        return both.wait(20) >= 0

    outcome = disturbed(kept, [Waiting(1, 1, "F", together, 6), Waiting(2, 1, "B", together, 3)])
    assert went_back(outcome)
    assert outcome.plans[-1] == "1x1"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("phase", "back"), [("vote", False), ("apply", True)])
def test_a_death_around_the_vote(kept: Kept, alone: tuple[float, ...], phase: Phase, back: bool) -> None:
    """Before the vote the step runs again. After it there is no copy of what was applied: the run goes back."""
    copied, voted = kept.on(2, step=1), kept.voted(0, 2, step=1)
    outcome = disturbed(kept, [Waiting(1, 1, phase, lambda: copied() and (not back or voted()))])
    assert outcome.plans == ("3x1", "2x1")
    assert went_back(outcome) == back
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
def test_a_death_while_a_copy_is_sent(kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come of it is thrown away."""
    begun = threading.Event()

    def stuck(part_s: float) -> float:
        begun.set()
        return 100.0

    monkeypatch.setattr(wire, "PART_BYTES", 1024)
    monkeypatch.setattr(sending, "pause_s", stuck)
    outcome = disturbed(kept, [Waiting(1, 1, "B", lambda: begun.wait(20), 3)])
    assert went_back(outcome)
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_sums_of_a_lost_worker_are_kept_as_they_were_copied(
    kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Only what it has added since runs again, and what was in flight."""
    monkeypatch.setattr(sending, "sums_pause_s", lambda round_s, size_bytes: 0.0)
    outcome = disturbed(kept, [Waiting(rank, 2, "B", kept.on((rank + 1) % 3, step=2), 25)])
    copies = [count for (keeper, step, _), count in kept.sums.items() if (keeper, step) == ((rank + 1) % 3, 2)]
    assert copies
    assert not went_back(outcome)
    assert outcome.plans == ("3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert 5 < outcome.kept[1] <= 25
