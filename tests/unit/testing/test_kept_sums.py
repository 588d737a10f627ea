"""After a loss in the middle of a step, only the micro-batches that some section lacks run again: same losses."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

import varuna
import varuna.core.sums
from tests.unit.engine.models import Dropping, Tokens, adamw
from tests.unit.testing import work
from tests.unit.testing.test_length_variants import LENGTHS, Positions, Sentences, padded
from tests.unit.testing.work import CAPTURES, OnceOthers, disturbed
from varuna.core.sums import HeldSums, IndexSet, deal, numbers_of, spans_of
from varuna.engine.base.spans import Span
from varuna.engine.stage.stage import Stage
from varuna.testing import run
from varuna.testing.faults import Fault, Phase

STEPS, MICRO_BATCHES = 4, 12


class Recovering(OnceOthers):
    """A worker of the generation that goes on with the step is lost, once another pipeline has done some of it."""

    def __init__(self, rank: int, step: int, phase: Phase) -> None:
        super().__init__(rank, step, phase, done=0 if phase == "form" else 1)
        self._goes_on, self.unfinished_sums = False, Counter[tuple[int, int]]()
        """by rank and section; such a sum is made in place, and of it nothing is left"""

    def on_span(self, span: Span) -> None:
        """Only from the forming of that generation on."""
        self._goes_on |= (span.phase, span.rank, span.step, span.name) == ("begin", self.rank, self.step, "form")
        if self._goes_on:
            if (span.step, span.name) == (self.step, "sum"):
                self.unfinished_sums[span.rank, span.index] += 1 if span.phase == "begin" else -1
            super().on_span(span)


class Unreduced:
    """Rank 3 does its last backward only once the step is broken off: before, nothing is a total of all replicas.

    The one worker that goes on from a total would otherwise take a section's sums along.
    """

    def __init__(self, step: int) -> None:
        self._step, self._begun, self._broken_off = step, 0, threading.Event()

    def hear(self, span: Span) -> None:
        """Let it wait."""
        if (span.phase, span.name) == ("begin", "hold"):
            self._broken_off.set()
        if (span.phase, span.rank, span.step, span.name) == ("begin", 3, self._step, "B"):
            self._begun += 1
            if self._begun == MICRO_BATCHES // 3:
                assert self._broken_off.wait(60), "the step was not broken off"


class Late(Fault):
    """A worker is lost at its fourth backward, once some others have nothing left to do but to wait for it."""

    def __init__(self, rank: int, step: int, others: Sequence[int]) -> None:
        super().__init__(rank, step, "B", None)
        self._begun, self._waiting, self._others = 0, set[int](), frozenset(others)
        self._ready = threading.Event()

    def on_span(self, span: Span) -> None:
        """Note who waits."""
        if (span.phase, span.step, span.name) == ("begin", self.step, "reduce"):
            self._waiting.add(span.rank)
            if self._waiting >= self._others:
                self._ready.set()
        if (span.phase, span.rank, span.step, span.name) == ("begin", self.rank, self.step, "B"):
            self._begun += 1
            if self._begun == 4 and not self.happened:
                assert self._ready.wait(60)
                super().on_span(span)


script = work.script(STEPS, MICRO_BATCHES, 2)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES, 2)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("phase", ["form", "F", "reduce"])
def test_two_losses_in_one_step_cost_only_what_is_lacking(alone: tuple[float, ...], phase: Phase) -> None:
    """Rank 2 is lost after 2 backwards, and rank 3 while the others go on with the step, or are about to."""
    second = Recovering(3, 2, phase)
    faults = [OnceOthers(2, 2, "B", 2, others=(0, 4)), second]
    outcome = disturbed(script, Unreduced(2).hear, dict.fromkeys(range(1, 7), 2), faults)
    assert outcome.plans == ("2x3", "2x2", "2x2")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert outcome.kept[0] == 0
    assert all(0 < kept < MICRO_BATCHES for kept in outcome.kept[1:-1]), outcome.kept
    assert outcome.kept[-1] < MICRO_BATCHES
    assert outcome.kept[-1] > 0 or any(second.unfinished_sums.values()), outcome.kept


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_the_same_loss_gives_the_same_bits() -> None:
    """The first pipeline has done its share; whose sums are gone on from does not depend on chance, nor do any bits."""
    parameters: list[dict[tuple[int, str], bytes]] = []

    def watched() -> None:
        def note(named: Sequence[tuple[str, nn.Parameter]]) -> None:
            for name, value in named:
                seen[now["step"], name] = value.detach().numpy().tobytes()

        seen, now = parameters[-1], {"step": 0}
        job = (Dropping, Tokens(padded=True), adamw, 2 * MICRO_BATCHES)
        trainer = varuna.Trainer(*job, micro_batch=2, clip_grad_norm=1.0, before_step=note, state={"now": now})
        for step in trainer.steps(STEPS):
            now["step"] = step.index + 1

    outcomes = []
    for _ in range(2):
        parameters.append({})
        outcomes.append(run(watched, captures=CAPTURES, workers=4, stages=2, faults=[Late(3, 2, (0, 1))]))
    first, second = outcomes
    assert first.plans == second.plans == ("2x2", "2x1")
    assert first.kept == second.kept == (0, MICRO_BATCHES // 2)
    assert first.losses == second.losses
    assert {step for step, _ in parameters[0]} == set(range(STEPS))
    assert parameters[0] == parameters[1]


@pytest.mark.timeout(200)
def test_sums_that_are_not_what_was_told_cost_time_and_not_the_run(
    alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's word of its sums is falsified on the way: within its share, so that the manager believes it."""
    told = Stage.held_sums

    def falsified(stage: Stage) -> HeldSums | None:
        held = told(stage)
        if held is None:
            return held
        sections = [
            each.model_copy(update={"micro_batches": spans_of(numbers_of(each.micro_batches)[1:])})
            for each in held.sections
        ]
        return held.model_copy(update={"sections": tuple(each for each in sections if each.micro_batches)})

    monkeypatch.setattr(Stage, "held_sums", falsified)
    outcome = run(script, captures=CAPTURES, workers=4, stages=2, faults=[Late(3, 2, (0, 1))])
    assert outcome.plans[:2] == ("2x2", "2x1")
    assert outcome.kept[1] == MICRO_BATCHES // 2 - 1
    assert outcome.kept[-1] == 0
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param({4: 2, 3: 3}, id="deeper"),
        pytest.param({6: 2, 5: 4}, id="much deeper", marks=pytest.mark.nightly),
        pytest.param({4: 2, 3: 1}, id="shallower", marks=pytest.mark.nightly),
    ],
)
def test_sums_move_where_the_number_of_stages_changes(alone: tuple[float, ...], stages: dict[int, int]) -> None:
    """A worker of the second pipeline is lost after 3 backwards: what the others have added is not lost."""
    workers = max(stages)
    outcome = run(script, captures=CAPTURES, workers=workers, stages=stages, faults=[OnceOthers(2, 2, "B", 3)])
    assert outcome.plans[0] == f"2x{workers // 2}"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert MICRO_BATCHES // 6 <= outcome.kept[1] < MICRO_BATCHES


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_sums_that_lack_a_micro_batch_cost_time_and_not_the_run(
    alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vote counts what is in the sums: a step of which something is missing runs again, from zero."""

    def forgetful(spans: IndexSet, *replicas: Any) -> Sequence[IndexSet]:
        return deal(spans_of(numbers_of(spans)[:-1]), *replicas)

    monkeypatch.setattr(varuna.core.sums, "deal", forgetful)
    outcome = run(script, captures=CAPTURES, workers=4, stages=2, faults=[OnceOthers(2, 2, "B", 3)])
    assert outcome.plans == ("2x2", "2x1", "2x1")
    assert outcome.kept[1] > 0
    assert outcome.kept[2] == 0
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


def of_several_lengths() -> list[int]:
    trainer = varuna.Trainer(
        Positions,
        Sentences(),
        adamw,
        MICRO_BATCHES,
        micro_batch=1,
        clip_grad_norm=1.0,
        collate=varuna.Collate(padded, lengths=LENGTHS),
    )
    return [step.index for step in trainer.steps(STEPS)]


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("stages", "other"), [({4: 4, 3: 3}, 0), ({4: 2, 3: 3}, 0), ({6: 3, 5: 5}, 3)], ids=["4x1", "2x2", "3x2"]
)
def test_a_step_that_runs_in_an_order_by_length_is_kept_like_any_other(stages: dict[int, int], other: int) -> None:
    """The numbers of the micro-batches in sums are no run. The first stage of the other pipeline has done its part."""
    undisturbed = run(of_several_lengths, captures=CAPTURES).losses
    fault = OnceOthers(2, 2, "B", 4, others=(other,), done=3)
    outcome = run(of_several_lengths, captures=CAPTURES, workers=max(stages), stages=stages, faults=[fault])
    assert outcome.losses == pytest.approx(undisturbed, rel=1e-6)
    assert len(outcome.plans) == 2
    if stages != {4: 4, 3: 3}:
        assert 0 < outcome.kept[1] < MICRO_BATCHES
