"""Where each section has one holder, the loss of a worker costs the step in flight and no more: same losses."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

import varuna
from tests.unit.engine.ranks import Dropping, Tokens, adamw
from tests.unit.testing.work import CAPTURES, disturbed
from varuna.engine.base.spans import Span
from varuna.engine.copies import sending, wire
from varuna.engine.stage.sums import Sums, SumWanted
from varuna.schedule.copy_pace import SumsPace
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
        self._added: Counter[tuple[int, int]] = Counter()
        self._senders: dict[int, int] = {}  # rank by thread
        self._wanted: dict[int, SumWanted] = {}  # by rank
        self.slow: tuple[int, int] | None = None
        """a rank of the first plan that begins backwards of a step only while a copy of its sums is wanted"""

    def hear(self, span: Span) -> None:
        """Note it."""
        if (span.name, span.phase) == ("copy", "begin"):
            self._senders[threading.get_ident()] = span.rank
        if span.name == "form" and span.index:
            self.slow = None
        if (span.name, span.phase, span.rank, span.step) == ("B", "begin", *(self.slow or ())):
            assert self.on((span.rank + 1) % 3, step=span.step)()
            assert self._wait(lambda: self._is_wanted(span.rank)), "nobody wants a copy"
        if (span.name, span.phase) == ("B", "end"):
            with self._changed:
                self._added[span.rank, span.step] += 1
                self._changed.notify_all()
        if (span.name, span.phase) == ("kept", "end"):
            with self._changed:
                self._seen.add((span.rank, span.step))
                self._changed.notify_all()
        if (span.name, span.phase) == ("apply", "begin"):
            with self._changed:
                self._voted.add((span.rank, span.step))
                self._changed.notify_all()

    def wants(self, wanted: SumWanted) -> None:
        """Note what the sender of copies wants whose thread this is, unless it is one of an earlier run."""
        rank = self._senders.get(threading.get_ident())
        if rank is not None:
            with self._changed:
                self._wanted[rank] = wanted
                self._changed.notify_all()

    def on(self, *ranks: int, step: int) -> Callable[[], bool]:
        """Wait until these ranks have complete copies of a step's state."""
        return lambda: self._wait(lambda: {(rank, step) for rank in ranks} <= self._seen)

    def voted(self, *ranks: int, step: int) -> Callable[[], bool]:
        """Wait until these ranks have the result of a step's vote."""
        return lambda: self._wait(lambda: {(rank, step) for rank in ranks} <= self._voted)

    def added(self, number: int, step: int) -> Callable[[], bool]:
        """Wait until all three ranks have done so many backwards of a step."""
        return lambda: self._wait(lambda: all(self._added[rank, step] >= number for rank in range(3)))

    def _is_wanted(self, rank: int) -> bool:
        wanted = self._wanted.get(rank)
        return wanted is not None and not wanted.taken.is_set()

    def _wait(self, ready: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, 20)


def script() -> list[int]:
    trainer = varuna.Trainer(Dropping, Tokens(padded=True), adamw, MICRO_BATCHES, micro_batch=1, clip_grad_norm=1.0)
    return [step.index for step in trainer.steps(STEPS)]


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return run(script, captures=CAPTURES).losses


@pytest.fixture
def kept() -> Kept:
    return Kept()


def without_replicas(kept: Kept, faults: Sequence[Fault], workers: int = 3) -> RunResult:
    return disturbed(script, kept.hear, {each: each for each in range(1, workers + 1)}, faults)


def went_back(outcome: RunResult) -> bool:
    return any("ROLLBACK" in text for text in outcome.warnings)


@pytest.mark.timeout(200)
def test_two_workers_die_in_the_middle_of_steps(kept: Kept, alone: tuple[float, ...]) -> None:
    """Their neighbours have copies of what only they had; the second death comes in the first step of a new plan."""
    faults = [Waiting(1, 1, "B", kept.on(3, step=1), 15), Waiting(0, 2, "F", kept.on(1, step=2), 20)]
    outcome = without_replicas(kept, faults, workers=4)
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
def test_a_worker_dies_while_the_next_plan_forms(kept: Kept, alone: tuple[float, ...]) -> None:
    """The first one's sections are on their way from their copy, and the second one's copy is still there, too."""
    faults = [Waiting(1, 2, "B", kept.on(3, 0, step=2), 5), Waiting(1, 2, "form", lambda: True)]
    outcome = without_replicas(kept, faults, workers=4)
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
def test_an_owner_and_its_keeper_die_together(kept: Kept, alone: tuple[float, ...]) -> None:
    both = threading.Barrier(2)

    def together() -> bool:
        return both.wait(20) >= 0

    outcome = without_replicas(kept, [Waiting(1, 1, "F", together, 6), Waiting(2, 1, "B", together, 3)])
    assert went_back(outcome)
    assert outcome.plans[-1] == "1x1"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("phase", "back"), [("vote", False), ("apply", True)])
def test_a_death_around_the_vote(kept: Kept, alone: tuple[float, ...], phase: Phase, back: bool) -> None:
    """Before the vote the step runs again. After it there is no copy of what was applied: the run goes back."""
    copied, voted = kept.on(2, step=1), kept.voted(0, 2, step=1)
    outcome = without_replicas(kept, [Waiting(1, 1, phase, lambda: copied() and (not back or voted()))])
    assert outcome.plans == ("3x1", "2x1")
    assert went_back(outcome) == back
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
def test_a_death_while_a_copy_is_sent(kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come of it is thrown away."""
    begun = threading.Event()

    def stuck(part_s: float, since_s: float, step_s: float) -> float:
        begun.set()
        return 100.0

    monkeypatch.setattr(wire, "PART_BYTES", 1024)
    monkeypatch.setattr(sending, "state_pause_s", stuck)
    outcome = without_replicas(kept, [Waiting(1, 1, "B", lambda: begun.wait(20), 3)])
    assert went_back(outcome)
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_sums_of_a_lost_worker_are_kept_as_they_were_copied(
    kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Only what it has added since runs again, and what was in flight."""
    want = Sums.want

    def noted(sums: Sums, wanted: SumWanted) -> None:
        want(sums, wanted)
        kept.wants(wanted)

    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))
    monkeypatch.setattr(Sums, "want", noted)
    kept.slow = (rank, 2)
    outcome = without_replicas(kept, [Waiting(rank, 2, "B", kept.added(20, step=2), 25)])
    assert not went_back(outcome)
    assert outcome.plans == ("3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert 15 <= outcome.kept[1] <= 25
