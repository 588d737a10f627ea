"""Optimizer state follows its section while the first step of a plan runs: nobody waits for it but the update."""

import threading
from typing import Any

import pytest

import varuna
from tests.depth import by_depth
from tests.unit.engine.optimizers import adagrad
from tests.unit.testing import work
from tests.unit.testing.work import CAPTURES, disturbed
from tests.waiting import wait_for
from varuna.engine.base.spans import Span
from varuna.engine.copies import keeping
from varuna.testing import Fault, fail_at, notice_at, run
from varuna.testing.faults import Phase

STEPS, MICRO_BATCHES, STEP = by_depth((5, 8, 2), (8, 12, 2))


class Late:
    """A link that sends state only once its target has run all backwards of the step that the state is for."""

    def __init__(self) -> None:
        self._computed: dict[int, int] = {}
        self._lock, self._enough = threading.Lock(), threading.Event()
        self.step = -1
        self.order: list[tuple[str, str]] = []
        """names of spans, and whether they begin or end: of what is sent, and of votes on that step"""

    def on_span(self, span: Span) -> None:
        if (span.name, span.phase) == ("send-rest", "begin"):
            self.step = span.step
            assert self._enough.wait(60), "no rank has run the step without its optimizer state"
        if span.step != self.step:
            return
        with self._lock:
            if span.name in ("send-rest", "vote"):
                self.order.append((span.name, span.phase))
            if (span.name, span.phase) == ("B", "end"):
                self._computed[span.rank] = self._computed.get(span.rank, 0) + 1
                if self._computed[span.rank] == MICRO_BATCHES:
                    self._enough.set()


trained = work.script(STEPS, MICRO_BATCHES)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_step_runs_before_its_optimizer_state_is_there(alone: tuple[float, ...]) -> None:
    """Of a leaver, too, which stays until it has sent it."""
    late = Late()
    outcome = disturbed(trained, late.on_span, {3: 3, 2: 2}, [notice_at(rank=1, step=1, seconds=10)])
    assert (outcome.plans, outcome.warnings) == (("3x1", "2x1"), ())
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    sent = [number for number, each in enumerate(late.order) if each == ("send-rest", "end")]
    assert sent, "nothing followed"
    assert late.order.index(("vote", "end")) > max(sent)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16", "memory": varuna.Memory(shard_optimizer=True)},
        {"precision": "fp16", "memory": varuna.Memory(offload_optimizer=True)},
        {"precision": "bf16", "ema": 0.9},
        {"optimizer": adagrad},
    ],
    ids=["bf16-sharded", "fp16-offloaded", "bf16-averaged", "adagrad"],
)
def test_it_is_the_state_of_before(options: dict[str, Any]) -> None:
    """Parameters in half precision come first; the update has those in fp32."""
    script = work.script(STEPS, MICRO_BATCHES, **options)
    undisturbed = run(script, workers=4, stages=2, captures=CAPTURES).losses
    late = Late()
    outcome = disturbed(script, late.on_span, {4: 2, 3: 3}, [notice_at(rank=1, step=1, seconds=10)])
    assert outcome.plans == ("2x2", "3x1")
    assert late.step > 0, "nothing followed"
    assert outcome.losses == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_on_a_machine_without_room_nothing_stays_longer_than_it_must(
    alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that was sent is dropped once it has arrived, before the update: a leaver and a loss are one morph each."""
    monkeypatch.setattr(keeping, "available_bytes", lambda: 0)
    faults = [notice_at(rank=1, step=1, seconds=10), fail_at(rank=2, step=5, phase="B")]
    outcome = disturbed(trained, lambda span: None, {4: 2, 3: 3, 2: 2}, faults)
    assert outcome.plans[:2] == ("2x2", "3x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


class OnceCopied(Fault):
    """A worker is lost at a backward, once all ranks' states have copies on others."""

    def __init__(self, rank: int, workers: int) -> None:
        super().__init__(rank, STEP, "B", None)
        self._workers, self._kept = workers, set[int]()

    def is_here(self, span: Span) -> bool:
        """Wait for the copies, if this is the place."""
        if (span.name, span.phase, span.step) == ("kept", "end", STEP):
            self._kept.add(span.rank)
        if not super().is_here(span):
            return False
        wait_for(lambda: len(self._kept) == self._workers, 60)
        return True


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("shapes", "phase", "at_end"),
    [
        pytest.param(
            shapes,
            phase,
            at_end,
            id=f"{name}-{phase}-{'end' if at_end else 'begin'}",
            marks=() if (name, phase, at_end) == ("2x2", "send-rest", False) else pytest.mark.nightly,
        )
        for name, shapes in {"2x2": {4: 2, 3: 3, 2: 2, 1: 1}, "3x1": {3: 3, 2: 2, 1: 1}}.items()
        for phase in ("send-rest", "take-rest")
        for at_end in (False, True)
    ],
)
def test_a_rank_dies_around_it(alone: tuple[float, ...], phase: Phase, at_end: bool, shapes: dict[int, int]) -> None:
    """Whatever is lost with it: the losses are the same. Nothing is given up while anybody has it."""
    workers = max(shapes)
    first = fail_at(rank=3, step=STEP, phase="B") if workers == 4 else OnceCopied(2, workers)
    outcome = disturbed(trained, lambda span: None, shapes, [first, AnyRank(phase, at_end=at_end)])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert len(outcome.plans) >= 3


class AnyRank(Fault):
    """Whoever is first to send or to take state that follows is lost there."""

    def __init__(self, phase: Phase, *, at_end: bool) -> None:
        super().__init__(-1, STEP, phase, None, at_end=at_end)

    def is_here(self, span: Span) -> bool:
        """On any rank that has a stage."""
        if (span.name, span.phase) == (self.phase, self._mark) and not self.happened and span.stage >= 0:
            self.rank = span.rank
        return super().is_here(span)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_leaver_dies_before_it_has_sent_it(alone: tuple[float, ...]) -> None:
    """Nobody else has it: the run goes back, and trains the same."""
    faults: list[Fault] = [notice_at(rank=1, step=STEP, seconds=10), Leaver()]
    outcome = disturbed(trained, lambda span: None, {3: 3, 2: 2}, faults)
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


class Leaver(Fault):
    """A rank without a stage is lost as it begins to send what follows."""

    def __init__(self) -> None:
        super().__init__(2, -1, "send-rest", None)

    def is_here(self, span: Span) -> bool:
        """In whatever step."""
        if (span.name, span.phase, span.stage) != ("send-rest", "begin", -1) or self.happened:
            return False
        self.rank, self.happened = span.rank, True
        return True
