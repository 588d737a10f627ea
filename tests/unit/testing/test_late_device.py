"""What outlives a loss does so on a device beside the host, too: over streams that are as late as they may be."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import varuna
from tests.unit.engine.late import LateStreams
from tests.unit.engine.ranks import Dropping, Tokens, adamw
from tests.unit.testing.test_saved_sums import AllAtOnce, slow
from tests.unit.testing.work import CAPTURES, OnceOthers, disturbed
from varuna.core.errors import VarunaError
from varuna.engine.base.spans import Span
from varuna.engine.copies import sending
from varuna.engine.device.host_copies import DONE, Ready, StreamCopies
from varuna.engine.links.traffic import Traffic, traffic_over
from varuna.engine.worker import sums_saver
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.job import start
from varuna.schedule.copy_pace import SumsPace
from varuna.testing import Fault, notice_at, run

STEPS, STEP, MICRO_BATCHES = 4, 1, 72


class Devices:
    """Gives every worker a late device, and remembers them."""

    def __init__(self) -> None:
        self.made: list[LateStreams] = []
        self.over: Callable[[LateStreams], Traffic] = traffic_over

    def __call__(self, *_: object) -> Traffic:
        self.made.append(LateStreams())
        return self.over(self.made[-1])


def script(folder: Path | None = None, **options: Any) -> Callable[[], list[int]]:
    checkpoints = None if folder is None else varuna.Checkpoints(folder, every=timedelta(milliseconds=1))

    def trained() -> list[int]:
        trainer = varuna.Trainer(
            Dropping,
            Tokens(padded=True),
            adamw,
            MICRO_BATCHES,
            micro_batch=1,
            clip_grad_norm=1.0,
            checkpoints=checkpoints,
            **options,
        )
        return [step.index for step in trainer.steps(STEPS)]

    return trained


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    """On a CPU."""
    return run(script(), captures=CAPTURES).losses


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    monkeypatch.setattr(start, "traffic_of", made)
    return made


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are copied all the time."""
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))


class OnceKept(Fault):
    """A worker is lost at a backward, once its state has a copy, and each rank has sent sums of so many sections."""

    def __init__(self, rank: int, ranks: int, sums: int) -> None:
        super().__init__(rank, STEP, "B", None)
        self._sums = dict.fromkeys(range(ranks), sums)

    def hear(self, span: Span) -> None:
        """Count copies."""
        if (span.name, span.phase, span.step) == ("copy-sum", "end", self.step):
            self._sums[span.rank] -= 1
        super().hear(span)

    def is_here(self, span: Span) -> bool:
        """Not before."""
        return max(self._sums.values()) <= 0 and super().is_here(span)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "shapes", [{4: 2, 3: 3}, {4: 2, 3: 1}, {6: 2, 5: 4}], ids=["deeper", "shallower", "much deeper"]
)
def test_sums_outlive_a_loss_and_move(
    alone: tuple[float, ...], devices: Devices, shapes: Mapping[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(0, 1000.0))
    outcome = disturbed(script(), lambda span: None, shapes, [OnceOthers(2, STEP, "B", 5)])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert 0 < outcome.kept[1] < MICRO_BATCHES
    assert len(devices.made) == max(shapes)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "memory": varuna.Memory(offload_optimizer=True)}])
def test_copies_of_state_and_sums_take_the_place_of_a_lost_pipeline(
    alone: tuple[float, ...], devices: Devices, options: dict[str, Any], without_pauses: None
) -> None:
    expected = run(script(**options), captures=CAPTURES).losses if options else alone
    with slow(STEP):
        outcome = disturbed(script(**options), lambda span: None, {3: 3, 2: 2}, [OnceKept(1, 3, 4)])
    assert outcome.plans == ("3x1", "2x1")
    assert not any("ROLLBACK" in text for text in outcome.warnings)
    assert outcome.losses == pytest.approx(expected, rel=1e-6)
    assert outcome.kept[1] > 0
    assert all(streams.copies for streams in devices.made)


@pytest.mark.timeout(200)
def test_optimizer_state_follows_a_section(alone: tuple[float, ...], devices: Devices) -> None:
    followed = list[int]()

    def hear(span: Span) -> None:
        if (span.name, span.phase) == ("take-rest", "end"):
            followed.append(span.index)

    outcome = disturbed(script(), hear, {3: 3, 2: 2}, [notice_at(rank=1, step=STEP, seconds=10)])
    assert (outcome.plans, outcome.warnings) == (("3x1", "2x1"), ())
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert followed


@pytest.mark.timeout(200)
def test_sums_that_were_saved_outlive_the_loss_of_all(
    alone: tuple[float, ...], devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums_saver, "LOOK_S", 0.01)
    monkeypatch.setattr(Snapshotter, "sums_due_s", lambda saver, outliving=None: 0.0)
    with slow(STEP), pytest.raises(VarunaError):
        run(
            script(tmp_path), workers=3, stages=3, captures=CAPTURES, faults=[AllAtOnce(STEP, tmp_path, 3, more_than=7)]
        )
    outcome = run(script(tmp_path), workers=2, stages=2, captures=CAPTURES)
    assert outcome.losses == pytest.approx(alone[STEP:], rel=1e-6)
    assert outcome.kept[0] >= 8


class Rash(StreamCopies):
    """Says that copies are done when they are queued."""

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready | None = None) -> Ready:
        super().down(pairs, after)
        return DONE


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "over",
    [
        lambda streams: traffic_over(streams)._replace(sums=Rash(streams)),
        lambda streams: traffic_over(streams)._replace(state=Rash(streams)),
    ],
    ids=["sums", "state"],
)
def test_a_wait_that_is_left_out_would_be_seen(
    alone: tuple[float, ...], devices: Devices, over: Callable[[LateStreams], Traffic], without_pauses: None
) -> None:
    """What the tests above rest on: the survivors go on from nonsense, if at all."""
    devices.over = over
    with slow(STEP):
        try:
            losses = disturbed(script(), lambda span: None, {3: 3, 2: 2}, [OnceKept(1, 3, 4)]).losses
        except VarunaError:
            return
    assert losses != pytest.approx(alone, rel=1e-6)
