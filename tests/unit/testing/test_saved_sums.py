"""A run that loses all its workers in the middle of a step goes on there: its checkpoint has what they had added up."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import varuna
from tests.depth import by_depth, nightly_rows
from tests.unit.engine.models import Tokens
from tests.unit.engine.stage.test_batch_norm import sgd
from tests.unit.testing import work
from tests.unit.testing.test_kept_statistics import Normalised
from tests.unit.testing.work import CAPTURES
from varuna.checkpoint.io.sums import read_sums, write_sums
from varuna.checkpoint.manifest import find_step
from varuna.checkpoint.names import step_folder
from varuna.checkpoint.saved_sums import labels_in
from varuna.core.errors import VarunaError
from varuna.core.sums import IndexSet, numbers_of, union
from varuna.engine.base.spans import Span, subscribe
from varuna.engine.worker import sums_saver
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.store.folder import FolderStore
from varuna.testing import RunResult, run
from varuna.testing.faults import Fault

STEPS, STEP, MICRO_BATCHES = 3, 1, by_depth(36, 72)
SECTIONS, ENOUGH, LATE = 6, 8, MICRO_BATCHES // 4


class AllAtOnce(Fault):
    """All workers are lost at a backward, once the store has more than so many micro-batches in the sums of all."""

    def __init__(self, step: int, folder: Path, workers: int, more_than: int) -> None:
        super().__init__(0, step, "B", None)
        self._store, self._workers, self._more_than = FolderStore(folder), workers, more_than
        self._backwards = 0

    def is_here(self, span: Span) -> bool:
        """At the first backward of rank 0 that begins after that: the others are lost first.

        Sums are saved as something is added to them, and on a busy machine later: late backwards wait some seconds.
        """
        if self.happened or (span.name, span.phase, span.rank, span.step) != ("B", "begin", self.rank, self.step):
            return False
        self._backwards += 1
        until_s = time.monotonic() + (4.0 if self._backwards > LATE else 0.0)
        while saved(self._store, self.step) <= self._more_than:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.02)
        self.happened = True
        for rank in range(1, self._workers):
            self.lose(rank)
        return True


def saved(store: FolderStore, step: int) -> int:
    """Count the micro-batches that the sums of all sections have, and whose losses are known."""
    found, losses = dict[int, list[IndexSet]](), set[int]()
    for label in labels_in(store, find_step(store, step)).values():
        if label is not None:
            found.setdefault(label.sums.section, []).append(label.sums.micro_batches)
            losses |= {loss.micro_batch for loss in label.losses}
    whole = set(range(MICRO_BATCHES)).intersection(losses, *(numbers_of(union(sets)) for sets in found.values()))
    return len(whole) if len(found) >= SECTIONS else 0


def text(folder: Path | None = None, **options: Any) -> Callable[[], list[int]]:
    every = timedelta(milliseconds=1)
    checkpoints = None if folder is None else varuna.Checkpoints(folder, every=every)
    return work.script(STEPS, MICRO_BATCHES, checkpoints=checkpoints, **options)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.fixture(autouse=True)
def saved_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_saver, "LOOK_S", 0.01)
    monkeypatch.setattr(Snapshotter, "sums_due_s", lambda saver, outliving=None: 0.0)


@contextmanager
def slow(step: int, seconds: float = 0.02) -> Iterator[None]:
    """Backwards of a step take a while."""

    def hear(span: Span) -> None:
        if (span.name, span.phase, span.step) == ("B", "begin", step):
            time.sleep(seconds)

    undo = subscribe(hear)
    yield
    undo()


def lost(
    script: Callable[[], Any], folder: Path, shape: tuple[int, int], *, step: int = STEP, more_than: int = ENOUGH - 1
) -> None:
    """A run of so many stages and replicas, all of which are lost in the middle of a step."""
    stages, replicas = shape
    workers = stages * replicas
    faults = [AllAtOnce(step, folder, workers, more_than)]
    with slow(step), pytest.raises(VarunaError, match=r"left|was requested"):
        run(script, workers=workers, stages=stages, faults=faults, captures=CAPTURES)


def go_on(script: Callable[[], Any], shape: tuple[int, int]) -> RunResult:
    return run(script, workers=shape[0] * shape[1], stages=shape[0], captures=CAPTURES)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2), (3, 1)),
        *nightly_rows(((3, 1), (1, 3)), ((1, 1), (2, 2))),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_a_run_goes_on_in_the_middle_of_a_step(
    alone: tuple[float, ...], tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    script = text(tmp_path)
    lost(script, tmp_path, before)
    outcome = go_on(script, after)
    assert outcome.kept[0] >= ENOUGH
    assert outcome.losses == pytest.approx(alone[STEP:], rel=1e-6)
    assert not outcome.warnings


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_the_first_step_is_no_exception(alone: tuple[float, ...], tmp_path: Path) -> None:
    """The state before it is saved during the step."""
    script = text(tmp_path)
    lost(script, tmp_path, (2, 1), step=0)
    outcome = go_on(script, (3, 1))
    assert outcome.kept[0] >= ENOUGH
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_loss_in_the_first_step_of_a_run_costs_a_part_of_it_too(alone: tuple[float, ...]) -> None:
    """Long enough for the others to have said that they run it: no vote shows yet whose state they have."""

    class Later(Fault):
        def is_here(self, span: Span) -> bool:
            is_here = super().is_here(span)
            if is_here:
                time.sleep(2.0)  # heartbeats are a second apart
            return is_here

    fault = Later(1, 0, "B", None, after=32)
    with slow(0, 0.06):
        outcome = run(text(), workers=4, stages={4: 2, 3: 3}, faults=[fault], captures=CAPTURES)
    assert outcome.kept[1] >= ENOUGH
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_sums_of_an_earlier_run_are_saved_with_what_is_added_to_them(alone: tuple[float, ...], tmp_path: Path) -> None:
    """Twice everybody is lost in the same step."""
    script = text(tmp_path)
    lost(script, tmp_path, (3, 1))
    first = saved(FolderStore(tmp_path), STEP)
    lost(script, tmp_path, (2, 1), more_than=first)
    outcome = go_on(script, (1, 1))
    assert outcome.kept[0] > first
    assert outcome.losses == pytest.approx(alone[STEP:], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16", "memory": varuna.Memory(shard_optimizer=True)},
        {"precision": "fp16", "memory": varuna.Memory(offload_optimizer=True)},
    ],
    ids=["bf16-sharded", "fp16-offloaded"],
)
def test_with_everything_that_changes_what_a_sum_is(tmp_path: Path, options: dict[str, Any]) -> None:
    undisturbed = run(text(**options), workers=4, stages=2, captures=CAPTURES)
    script = text(tmp_path, **options)
    lost(script, tmp_path, (2, 2))
    outcome = go_on(script, (2, 2))
    assert outcome.kept[0] >= ENOUGH
    assert outcome.losses == pytest.approx(undisturbed.losses[STEP:], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_what_is_not_what_was_written_is_not_used(alone: tuple[float, ...], tmp_path: Path) -> None:
    """One file has a wrong byte, another one no end, and a third one belongs to other parameters."""
    script = text(tmp_path)
    lost(script, tmp_path, (3, 1))
    folder = tmp_path / step_folder(STEP)
    byte, end, other = sorted(folder.glob("sums-*"))[:3]
    with byte.open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([last[0] ^ 1]))
    end.write_bytes(end.read_bytes()[:-5])
    label, tensors = read_sums(FolderStore(tmp_path), STEP, other.name)
    write_sums(FolderStore(tmp_path), STEP, other.name, label.model_copy(update={"parameters": 1}), tensors)
    outcome = go_on(script, (2, 1))
    assert outcome.losses == pytest.approx(alone[STEP:], rel=1e-6)
    assert outcome.kept[0] > 0
    assert outcome.kept[-1] == 0
    assert outcome.plans[0] == outcome.plans[-1] == "2x1"


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_another_job_begins_the_step_anew(tmp_path: Path) -> None:
    """Its metrics are not in what was saved."""
    lost(text(tmp_path), tmp_path, (3, 1))
    outcome = go_on(text(tmp_path, metrics=lambda output, batch: {"twice": 2 * output}), (3, 1))
    assert outcome.kept == (0,)


def normalised(folder: Path | None = None) -> Callable[[], list[float]]:
    def script() -> list[float]:
        checkpoints = None if folder is None else varuna.Checkpoints(folder, every=timedelta(milliseconds=1))
        trainer = varuna.Trainer(
            Normalised, Tokens(), sgd, 3 * MICRO_BATCHES, micro_batch=3, clip_grad_norm=1.0, checkpoints=checkpoints
        )
        return [trainer.evaluate(Tokens()).loss for step in trainer.steps(STEPS) if step.index == 2]

    return script


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_running_statistics_are_saved_with_the_sums(tmp_path: Path) -> None:
    """The loss over other data shows them."""
    undisturbed = run(normalised(), captures=CAPTURES)
    script = normalised(tmp_path)
    lost(script, tmp_path, (2, 1))
    outcome = go_on(script, (3, 1))
    assert outcome.kept[0] >= ENOUGH
    assert outcome.losses == pytest.approx(undisturbed.losses[STEP:], rel=1e-5)
    [expected] = undisturbed.returned.values()
    assert all(found == pytest.approx(expected, rel=1e-5) for found in outcome.returned.values())
