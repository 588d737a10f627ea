"""``varuna.testing``: a job on threads computes what one process computes, whatever is lost, and ends in words."""

import itertools
import threading
from typing import Literal

import pytest
import torch

import varuna
from tests.depth import nightly
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.testing.work import CAPTURES
from tests.waiting import wait_for
from varuna.core.errors import UsageError, VarunaError, WorkerError
from varuna.engine.stage.gradient_bucket import Bucket
from varuna.testing import FailingStore, fail_at, run

STEPS = 4


def script(checkpoints: varuna.Checkpoints | None = None) -> list[int]:
    trainer = varuna.Trainer(
        SmallLanguage,
        Tokens(),
        adamw,
        8,
        micro_batch=2,
        checkpoints=checkpoints,
    )
    return [step.index for step in trainer.steps(STEPS)]


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    outcome = run(script, captures=CAPTURES)
    assert outcome.plans == ("1x1",)
    assert outcome.returned == {"w0": list(range(STEPS))}
    return outcome.losses


def test_a_job_trains_the_same_on_two_by_two_and_after_a_loss(alone: tuple[float, ...]) -> None:
    """Rank 1 dies in B of step 2: the three that are left redo it as a pipeline of two, and the third waits.

    No thread of either generation is left.
    """
    fault, others = fail_at(rank=1, step=2, phase="B"), set(threading.enumerate())
    outcome = run(script, captures=CAPTURES, workers=4, stages=2, faults=[fault])
    assert fault.happened
    assert outcome.plans == ("2x2", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert len(outcome.returned) == 3
    wait_for(lambda: set(threading.enumerate()) <= others, 60)


def test_a_failing_bucket_ends_in_words_and_another_run_goes_on_from_what_it_has(alone: tuple[float, ...]) -> None:
    store = FailingStore()

    def saves_once() -> None:
        trainer = varuna.Trainer(
            SmallLanguage, Tokens(), adamw, 8, micro_batch=2, checkpoints=varuna.Checkpoints(store.url, every=2)
        )
        for step in trainer.steps(STEPS):
            if step.index == 2:
                wait_for(lambda: ("create", "step-00000002/manifest.json") in store.seen)
                store.fail("write", reason="507 insufficient storage")

    with pytest.raises(VarunaError, match=r"the last steps were not checkpointed.*Look at the warnings") as ended:
        run(saves_once, captures=CAPTURES, workers=2, stages=2)
    assert "newest complete checkpoint is that of step 2" in str(ended.value)
    store.fail()
    outcome = run(lambda: script(varuna.Checkpoints(store.url, every=2)), captures=CAPTURES, workers=2, stages=1)
    assert outcome.losses == pytest.approx(alone[2:], rel=1e-6)
    assert ("get", "step-00000002/manifest.json") in store.seen


@pytest.mark.parametrize("rotten", [4, *nightly(2)])
def test_a_checkpoint_that_the_store_cuts_short_is_found_out_and_the_one_before_counts(
    alone: tuple[float, ...], rotten: int
) -> None:
    """Only where it is the last one does it cost steps, and the run says so."""
    store, folder = FailingStore(), f"step-{rotten:08d}"
    marked = ("create", f"{folder}/damaged.txt")

    def rot(verb: str, name: str) -> None:
        if (verb, name) == ("create", f"{folder}/manifest.json"):
            part = next(entry.name for entry in store.inner.entries(folder) if entry.name.endswith(".safetensors"))
            store.inner.put(part, store.inner.get(part)[:-1])

    def saves() -> None:
        checkpoints = varuna.Checkpoints(store.url, every=2)
        trainer = varuna.Trainer(SmallLanguage, Tokens(), adamw, 8, micro_batch=2, checkpoints=checkpoints)
        for step in trainer.steps(STEPS):
            if step.index == rotten:  # the next checkpoint must not overtake it
                wait_for(lambda: marked in store.seen, 60)

    store.after = rot
    if rotten == STEPS:
        with pytest.raises(VarunaError, match="newest complete checkpoint is that of step 2"):
            run(saves, captures=CAPTURES, workers=2, stages=2)
        assert marked in store.seen
        store.after = lambda verb, name: None
        assert run(saves, captures=CAPTURES, workers=2, stages=1).losses == pytest.approx(alone[2:], rel=1e-6)
    else:
        assert run(saves, captures=CAPTURES, workers=2, stages=2).losses == pytest.approx(alone, rel=1e-6)


def test_no_process_is_forked_among_the_workers_threads(
    alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise AssertionError("a fork would keep open what all workers have opened")

    monkeypatch.setattr("os.fork", fork)
    assert run(script, captures=CAPTURES, workers=2, stages=2).losses == pytest.approx(alone, rel=1e-6)


def test_what_a_script_raises_comes_out_with_its_cause() -> None:
    broken = RuntimeError("CUDA out of memory")
    with pytest.raises(WorkerError, match=r"the script of worker w\d raised RuntimeError: CUDA out of memory") as ended:
        run(script, captures=CAPTURES, workers=2, stages=2, faults=[fail_at(rank=1, step=1, phase="F", error=broken)])
    assert ended.value.__cause__ is broken


@pytest.mark.parametrize("phase", ["F", "B"])
@pytest.mark.parametrize(("workers", "stages"), [(2, 2), (4, 2), (2, 1)])
def test_an_action_that_is_refused_memory_costs_the_step_and_no_worker(
    alone: tuple[float, ...], phase: Literal["F", "B"], workers: int, stages: int
) -> None:
    fault = fail_at(rank=1, step=2, phase=phase, at_end=True, error=torch.OutOfMemoryError("CUDA out of memory"))
    outcome = run(script, captures=CAPTURES, workers=workers, stages=stages, faults=[fault])
    assert fault.happened
    assert outcome.plans == (f"{stages}x{workers // stages}",) * 2
    assert len(outcome.returned) == workers
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert any("fill 10 % less" in warning for warning in outcome.warnings)


@pytest.mark.parametrize("at", [34, *nightly(32, 36, 39, 42)])
def test_sums_that_have_half_of_a_micro_batch_are_of_no_use_to_anybody(
    alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    collect, calls = Bucket.collect, itertools.count()

    def refused(bucket: Bucket) -> None:
        if bucket.flat.numel() and next(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        collect(bucket)

    monkeypatch.setattr(Bucket, "collect", refused)
    outcome = run(script, captures=CAPTURES, workers=2, stages=1)
    assert len(outcome.plans) == 2
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


def test_a_fault_that_does_not_happen_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"fail_at\(rank=0, step=9, phase='F'\) did not happen in 4 steps .* 1x1"):
        run(script, captures=CAPTURES, faults=[fail_at(rank=0, step=9)])
    with pytest.raises(UsageError, match="phase='forward' is not a phase of a step: use one of form, F, R, B"):
        fail_at(rank=0, step=0, phase="forward")  # type: ignore[arg-type]
