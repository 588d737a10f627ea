"""All that outlives a loss does so on a device beside the host, too: over streams that are as late as they may be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import varuna
from tests.unit.engine.late import Late, Rash
from tests.unit.testing import work
from tests.unit.testing.test_saved_sums import ENOUGH, MICRO_BATCHES, STEP, STEPS, go_on, lost, slow, text
from tests.unit.testing.work import CAPTURES, OnceOthers, disturbed
from varuna.core.errors import VarunaError
from varuna.engine.base.spans import Span
from varuna.engine.copies import sending
from varuna.engine.links.traffic import traffic_over
from varuna.engine.worker import generation, sums_saver
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.job import start
from varuna.schedule.copy_pace import SumsPace
from varuna.testing import Fault, notice_at, run


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    """On a CPU."""
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.fixture
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Late:
    """Every worker has a late device."""
    made = Late(getattr(request, "param", traffic_over))
    monkeypatch.setattr(start, "traffic_of", lambda *_, **__: made())
    return made


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """State is copied after each step, and sums all the time."""
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))
    monkeypatch.setattr(generation, "checkpoint_every_s", lambda *_, **__: 0.0)


class OnceKept(Fault):
    """A worker is lost at a backward, once its state has a copy, and each rank has sent sums of so many sections."""

    def __init__(self, rank: int, ranks: int, sums: int) -> None:
        super().__init__(rank, STEP, "B", None)
        self._sums = dict.fromkeys(range(ranks), sums)

    def on_span(self, span: Span) -> None:
        """Count copies."""
        if (span.name, span.phase, span.step) == ("copy-sum", "end", self.step):
            self._sums[span.rank] -= 1
        super().on_span(span)

    def is_here(self, span: Span) -> bool:
        """Not before."""
        return max(self._sums.values()) <= 0 and super().is_here(span)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "shapes", [{4: 2, 3: 3}, {4: 2, 3: 1}, {6: 2, 5: 4}], ids=["deeper", "shallower", "much deeper"]
)
def test_sums_outlive_a_loss_and_move(
    alone: tuple[float, ...], devices: Late, shapes: Mapping[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(0, 1000.0))
    outcome = disturbed(text(), lambda span: None, shapes, [OnceOthers(2, STEP, "B", 5)])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert 0 < outcome.kept[1] < MICRO_BATCHES
    assert len(devices.made) == max(shapes)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"precision": "bf16", "memory": varuna.Memory(offload_optimizer=True)}, marks=pytest.mark.nightly),
    ],
)
def test_copies_of_state_and_sums_take_the_place_of_a_lost_pipeline(
    alone: tuple[float, ...], devices: Late, options: dict[str, Any], without_pauses: None
) -> None:
    expected = run(text(**options), captures=CAPTURES).losses if options else alone
    with slow(STEP):
        outcome = disturbed(text(**options), lambda span: None, {3: 3, 2: 2}, [OnceKept(1, 3, 4)])
    assert outcome.plans == ("3x1", "2x1")
    assert not any("ROLLBACK" in text for text in outcome.warnings)
    assert outcome.losses == pytest.approx(expected, rel=1e-6)
    assert outcome.kept[1] > 0
    assert all(streams.copies for streams in devices.made)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_optimizer_state_follows_a_section(alone: tuple[float, ...], devices: Late) -> None:
    followed = list[int]()

    def hear(span: Span) -> None:
        if (span.name, span.phase) == ("take-rest", "end"):
            followed.append(span.index)

    outcome = disturbed(text(), hear, {3: 3, 2: 2}, [notice_at(rank=1, step=STEP, seconds=10)])
    assert (outcome.plans, outcome.warnings) == (("3x1", "2x1"), ())
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert followed


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_sums_that_were_saved_outlive_the_loss_of_all(
    alone: tuple[float, ...], devices: Late, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums_saver, "LOOK_S", 0.01)
    monkeypatch.setattr(Snapshotter, "sums_due_s", lambda saver, outliving=None: 0.0)
    lost(text(tmp_path), tmp_path, (3, 1))
    outcome = go_on(text(tmp_path), (2, 1))
    assert outcome.losses == pytest.approx(alone[STEP:], rel=1e-6)
    assert outcome.kept[0] >= ENOUGH


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "devices",
    [
        lambda streams: traffic_over(streams)._replace(sums=Rash(streams)),
        lambda streams: traffic_over(streams)._replace(state=Rash(streams)),
    ],
    ids=["sums", "state"],
    indirect=True,
)
def test_a_wait_that_is_left_out_would_be_seen(alone: tuple[float, ...], devices: Late, without_pauses: None) -> None:
    """The tests above rest on this: the survivors go on from nonsense, if at all."""
    with slow(STEP):
        try:
            losses = disturbed(text(), lambda span: None, {3: 3, 2: 2}, [OnceKept(1, 3, 4)]).losses
        except VarunaError:
            return
    assert losses != pytest.approx(alone, rel=1e-6)
