"""A worker that holds most of its model in host memory dies: the losses are those of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import varuna
from tests.depth import nightly, nightly_rows
from tests.unit.engine.late import Late
from tests.unit.engine.models import Tokens, adamw
from tests.unit.engine.stage.test_frozen_stream import Deep
from tests.unit.testing.work import CAPTURES, disturbed, script, went_back
from varuna.job import start
from varuna.testing import fail_at, notice_at, run
from varuna.testing.faults import Fault

STEPS, MICRO_BATCHES = 4, 8
STREAMED: dict[str, Any] = {"memory": varuna.Memory(stream_frozen=True), "model": Deep}


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    """With all parameters on the device."""
    return run(script(STEPS, MICRO_BATCHES, model=Deep), captures=CAPTURES).losses


@pytest.mark.timeout(200)
@pytest.mark.parametrize("late", [True, *nightly(False)])
@pytest.mark.parametrize(
    ("shapes", "fault"),
    [
        ({4: 2, 3: 3}, lambda: fail_at(rank=1, step=2, phase="B", after=2)),
        *nightly_rows(
            ({3: 3, 2: 1}, lambda: fail_at(rank=2, step=1, phase="F", after=2)),
            ({4: 2, 2: 1}, lambda: notice_at(rank=0, step=1, seconds=10)),
        ),
    ],
    ids=["in B", "in F", "with notice"],
)
def test_a_loss_changes_no_loss(
    alone: tuple[float, ...],
    late: bool,
    shapes: dict[int, int],
    fault: Callable[[], Fault],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Late()
    if late:
        monkeypatch.setattr(start, "traffic_of", lambda *_, **__: devices())
    outcome = disturbed(script(STEPS, MICRO_BATCHES, **STREAMED), lambda span: None, shapes, [fault()])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert len(outcome.plans) == 2
    assert not went_back(outcome)
    assert all(streams.copies for streams in devices.made)


@pytest.mark.parametrize("first", [True, *nightly(False)])
def test_runs_with_and_without_go_on_from_each_others_checkpoints(tmp_path: Path, first: bool) -> None:
    """Losses of training and of other data."""

    def losses(steps: int, place: Path, *, streams: bool) -> list[tuple[float, float]]:
        trainer = varuna.Trainer(
            Deep,
            Tokens(),
            adamw,
            global_batch=4,
            micro_batch=1,
            device="cpu",
            checkpoints=varuna.Checkpoints(place, every=1),
            memory=varuna.Memory(stream_frozen=streams),
        )
        return [(step.loss, trainer.evaluate(Tokens(), examples=4).loss) for step in trainer.steps(steps)]

    undisturbed = losses(3, tmp_path / "one", streams=False)
    begun = losses(1, tmp_path / "two", streams=first)
    assert begun + losses(3, tmp_path / "two", streams=not first) == undisturbed
