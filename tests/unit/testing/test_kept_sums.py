"""After a loss in the middle of a step, only the micro-batches that some section lacks run again: same losses."""

from collections.abc import Sequence

import pytest

import varuna
import varuna.core.sums
from tests.unit.engine.ranks import Dropping, Tokens, adamw
from varuna.core.sums import Spans, deal, numbers_of, spans_of
from varuna.engine.base.spans import Span
from varuna.testing import run
from varuna.testing.faults import Fault, Phase

STEPS, MICRO_BATCHES = 4, 12


class After(Fault):
    """A worker is lost in a phase that it has begun before, so often."""

    def __init__(self, rank: int, step: int, phase: Phase, often: int) -> None:
        super().__init__(rank, step, phase, None)
        self._left = often

    def hear(self, span: Span) -> None:
        """Let it pass at first."""
        here = (span.phase, span.rank, span.step, span.name) == ("begin", self.rank, self.step, self.phase)
        if here and self._left:
            self._left -= 1
        else:
            super().hear(span)


def script() -> list[int]:
    trainer = varuna.Trainer(Dropping, Tokens(padded=True), adamw, 2 * MICRO_BATCHES, micro_batch=2, clip_grad_norm=1.0)
    return [step.index for step in trainer.steps(STEPS)]


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return run(script).losses


@pytest.mark.timeout(200)
def test_two_losses_in_one_step_cost_only_what_is_lacking(alone: tuple[float, ...]) -> None:
    """Rank 2 is lost after 3 backwards; of the pipeline that is left, the last stage, with the rest nearly done."""
    faults = [After(2, 2, "B", 3), After(1, 3, "reduce", 0)]
    outcome = run(script, workers=5, stages={5: 2, 4: 2, 3: 1}, faults=faults)
    assert outcome.plans == ("2x2", "2x2", "1x3")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert outcome.kept[0] == 0
    assert 0 < outcome.kept[1] < MICRO_BATCHES
    assert 0 < outcome.kept[2] < MICRO_BATCHES


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "stages", [{4: 2, 3: 3}, {6: 2, 5: 4}, {4: 2, 3: 1}], ids=["deeper", "much deeper", "shallower"]
)
def test_sums_move_where_the_number_of_stages_changes(alone: tuple[float, ...], stages: dict[int, int]) -> None:
    """A worker of the second pipeline is lost after 3 backwards: what the others have added is not lost."""
    workers = max(stages)
    outcome = run(script, workers=workers, stages=stages, faults=[After(2, 2, "B", 3)])
    assert outcome.plans[0] == f"2x{workers // 2}"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert MICRO_BATCHES // 6 <= outcome.kept[1] < MICRO_BATCHES


@pytest.mark.timeout(200)
def test_sums_that_lack_a_micro_batch_cost_time_and_not_the_run(
    alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vote counts what is in the sums: a step of which something is missing runs again, from zero."""

    def forgetful(spans: Spans, replicas: int) -> Sequence[Spans]:
        return deal(spans_of(numbers_of(spans)[:-1]), replicas)

    monkeypatch.setattr(varuna.core.sums, "deal", forgetful)
    outcome = run(script, workers=4, stages=2, faults=[After(2, 2, "B", 3)])
    assert outcome.plans == ("2x2", "2x1", "2x1")
    assert outcome.kept[1] > 0
    assert outcome.kept[2] == 0
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
