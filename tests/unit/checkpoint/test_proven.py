"""With ``keep_last=1`` too, a checkpoint that was read back stays until a newer one was read back."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import make_job, make_plan, save_parts
from tests.waiting import wait_for
from varuna.checkpoint import committer
from varuna.checkpoint.committer import CheckpointCommitter
from varuna.checkpoint.manifest import mark_damaged, survey
from varuna.checkpoint.names import MANIFEST
from varuna.core.errors import StoreError
from varuna.store.opening import open_store
from varuna.testing.stores import HookedStore


class Run:
    """A run that keeps one checkpoint, and whose reading back can be held up."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, *, rescues: bool = False) -> None:
        self.store = HookedStore(open_store(place))
        monkeypatch.setattr(committer, "open_store", lambda _: self.store)
        self.warnings: list[str] = []
        self.let = threading.Event()
        self.let.set()
        changes = {"checkpoint_dir": str(place), "keep_last": 1, "rescues": rescues}
        job = make_job().model_copy(update=changes)
        self.keep = CheckpointCommitter(
            job, new=False, overwrite=False, say=self.warnings.append, warn=self.warnings.append
        )
        self.plan = make_plan(1, 2)
        self.resumed = self.keep.newest()
        self.keep.begin(0, self.plan, first_step=0, rollback=True)
        self.store.before = self._before

    def _before(self, verb: str, name: str) -> None:
        if verb == "read_into":
            assert self.let.wait(60)

    def save(self, step: int) -> None:
        for shard in save_parts(self.store.inner, step, self.plan):
            self.keep.collect(shard)
        assert self.keep.wait_for(step, 10)
        assert self.keep.settle()

    def read_back(self) -> None:
        """Whatever waits for it."""
        self.let.set()
        assert self.keep.verifier.wait(10)
        assert self.keep.settle()

    @property
    def steps(self) -> list[int]:
        return [folder.step for folder in survey(self.store.inner)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch)
    yield made
    made.let.set()
    made.keep.close()


def test_it_stays_until_a_newer_one_is_read_back_and_there_is_never_a_third(run: Run) -> None:
    run.save(3)
    run.read_back()
    run.let.clear()
    for step in (6, 9, 12):
        run.save(step)
        assert run.steps == [step, 3]
    run.read_back()
    assert run.steps == [12]
    assert run.warnings == []


def test_it_stays_if_the_newer_one_is_damaged_and_goes_after_the_next(run: Run) -> None:
    run.save(3)
    run.read_back()
    run.let.clear()
    run.save(6)
    damaged = next(e.name for e in run.store.inner.entries("step-00000006") if e.name.endswith(".safetensors"))
    run.store.inner.put(damaged, run.store.inner.get(damaged)[:-1] + b"?")
    run.read_back()
    assert run.steps == [6, 3]
    assert run.keep.committed_step == 3
    run.let.clear()
    run.save(9)
    assert run.steps == [9, 3]
    run.read_back()
    assert run.steps == [9]


def test_where_nothing_can_be_read_back_one_more_stays(run: Run) -> None:
    run.save(3)
    run.read_back()

    def forbidden(verb: str, name: str) -> None:
        if verb == "read_into":
            raise StoreError("permission denied")

    run.store.before = forbidden
    for step in (6, 9, 12):
        run.save(step)
        run.read_back()
    assert run.steps == [12, 3]


def test_the_one_that_a_run_resumes_from_counts_as_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(tmp_path, monkeypatch)
    first.save(3)
    first.keep.close()
    second = Run(tmp_path, monkeypatch)
    assert second.resumed is not None
    second.let.clear()
    second.save(6)
    assert second.steps == [6, 3]
    second.read_back()
    assert second.steps == [6]
    second.keep.close()


def test_one_that_the_run_has_fallen_back_before_is_not_relied_on(run: Run) -> None:
    run.save(3)
    run.read_back()
    run.let.clear()
    run.save(6)
    wait_for(lambda: run.keep.verifier._under_way is not None, 10)
    mark_damaged(run.store.inner, 6, "a reader found it")
    found = run.keep.newest()
    assert found is not None
    assert found[0].step == 3
    run.read_back()
    run.let.clear()
    run.save(9)
    assert run.steps == [9, 3]


def test_checkpoints_that_rescue_a_run_are_one_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, rescues=True)
    for step in (3, 6):
        run.save(step)
        run.keep.newest()
        assert run.steps == [step]
    run.keep.close()


def test_what_cannot_be_removed_costs_no_checkpoint(run: Run) -> None:
    run.save(3)
    run.read_back()

    def keeps_all(verb: str, name: str) -> None:
        if verb == "remove" and name.endswith(MANIFEST):
            raise StoreError(f"cannot remove {name}: permission denied")

    run.store.before = keeps_all
    run.save(6)
    run.read_back()
    assert run.keep.committed_step == 6
    assert run.warnings == [
        "older checkpoints are not removed now: cannot remove step-00000003/manifest.json: permission denied"
    ]
