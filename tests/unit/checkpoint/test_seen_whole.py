"""A checkpoint counts once it is seen whole in the store; the one before stays until then, with ``keep_last=1`` too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import make_job, make_plan, save_parts
from varuna.checkpoint import committer
from varuna.checkpoint.committer import CheckpointCommitter
from varuna.checkpoint.manifest import find_step, mark_damaged, survey
from varuna.checkpoint.names import DAMAGED, MANIFEST
from varuna.core.errors import StoreError
from varuna.store.opening import open_store
from varuna.testing.stores import HookedStore


class Run:
    """A run that keeps one checkpoint."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, *, rescues: bool = False) -> None:
        self.store = HookedStore(open_store(place))
        monkeypatch.setattr(committer, "open_store", lambda _: self.store)
        self.warnings: list[str] = []
        self.committed: list[int] = []
        job = make_job().model_copy(update={"checkpoint_dir": str(place), "keep_last": 1, "rescues": rescues})
        say = self.warnings.append
        self.keep = CheckpointCommitter(
            job, new=False, overwrite=False, say=say, warn=say, committed=self.committed.append
        )
        self.plan = make_plan(1, 2)
        self.resumed = self.keep.newest()
        self.keep.begin(0, self.plan, first_step=0, rollback=True)

    def save(self, step: int) -> None:
        for shard in save_parts(self.store.inner, step, self.plan):
            self.keep.collect(shard)
        assert self.keep.wait_for(step, 10)  # also if it is damaged: nobody is held up
        assert self.keep.wait_until_settled()

    def spoil(self, change: Callable[[str], None]) -> None:
        """Change a shard in the store as soon as its checkpoint is committed."""

        def after(verb: str, name: str) -> None:
            if verb == "create" and name.endswith(MANIFEST):
                entries = self.store.inner.entries(name.partition("/")[0])
                change(next(entry.name for entry in entries if entry.name.endswith(".safetensors")))

        self.store.after = after

    @property
    def steps(self) -> list[int]:
        return [folder.step for folder in survey(self.store.inner)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch)
    yield made
    made.keep.close()


def test_the_one_before_goes_once_a_newer_one_is_seen_whole(run: Run) -> None:
    for step in (3, 6):
        run.save(step)
        assert run.steps == [step]
    assert run.committed == [3, 6]
    assert run.warnings == []


@pytest.mark.parametrize("how", ["short", "removed", "manifest"])
def test_a_damaged_one_is_marked_and_never_counts(run: Run, how: str) -> None:
    inner = run.store.inner
    changes: dict[str, Callable[[str], None]] = {
        "short": lambda name: inner.put(name, inner.get(name)[:-1]),
        "removed": inner.remove,
        "manifest": lambda name: inner.put(f"{name.partition('/')[0]}/{MANIFEST}", b"{}"),
    }
    run.save(3)
    run.spoil(changes[how])
    run.save(6)
    (warning,) = run.warnings
    assert "the checkpoint of step 6 is damaged" in warning
    assert "goes back to the checkpoint of step 3" in warning
    assert find_step(inner, 6).is_damaged
    assert (run.steps, run.committed, run.keep.committed_step) == ([6, 3], [3], 3)
    found = run.keep.newest()
    assert found is not None
    assert found[0].step == 3
    run.store.after = lambda verb, name: None
    run.save(9)
    assert (run.steps, run.committed) == ([9], [3, 9])


def test_without_another_checkpoint_that_is_said(run: Run) -> None:
    run.spoil(run.store.inner.remove)
    run.save(3)
    assert "No other checkpoint is whole" in run.warnings[0]
    assert run.keep.committed_step == -1


def test_where_nothing_can_be_read_one_more_stays_and_it_is_said_once(run: Run) -> None:
    run.save(3)

    def forbidden(verb: str, name: str) -> None:
        if verb == "get" and name.endswith(MANIFEST) and not name.startswith("step-00000003"):
            raise StoreError(f"cannot read {name}: permission denied")

    run.store.before = forbidden
    for step in (6, 9, 12):
        run.save(step)
    assert [text for text in run.warnings if "removed" not in text] == [
        "the checkpoint of step 6 cannot be read: cannot read step-00000006/manifest.json: permission denied. It was "
        "committed, and training goes on; whether it can be used is not known."
    ]
    assert 3 in run.steps
    assert run.keep.committed_step == 12


def test_the_one_that_a_run_resumes_from_counts_as_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(tmp_path, monkeypatch)
    first.save(3)
    first.keep.close()
    second = Run(tmp_path, monkeypatch)
    assert second.resumed is not None
    second.spoil(second.store.inner.remove)
    second.save(6)
    assert second.steps == [6, 3]
    second.keep.close()


def test_one_that_the_run_has_fallen_back_before_is_not_relied_on(run: Run) -> None:
    for step in (3, 6):
        run.save(step)
    mark_damaged(run.store.inner, 6, "a reader found it")
    run.save(9)
    assert run.steps == [9]


def test_damage_that_cannot_be_marked_is_said(run: Run) -> None:
    def read_only(verb: str, name: str) -> None:
        if verb == "create" and name.endswith(DAMAGED):
            raise StoreError("read-only file system")

    run.store.before = read_only
    run.spoil(run.store.inner.remove)
    run.save(3)
    assert "cannot be marked (read-only file system)" in run.warnings[0]


def test_checkpoints_that_rescue_a_run_are_one_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, rescues=True)
    for step in (3, 6):
        run.save(step)
        run.keep.newest()
        assert run.steps == [step]
    run.keep.close()


def test_what_cannot_be_removed_costs_no_checkpoint(run: Run) -> None:
    run.save(3)

    def keeps_all(verb: str, name: str) -> None:
        if verb == "remove" and name.endswith(MANIFEST):
            raise StoreError(f"cannot remove {name}: permission denied")

    run.store.before = keeps_all
    run.save(6)
    assert run.keep.committed_step == 6
    assert run.warnings == [
        "older checkpoints are not removed now: cannot remove step-00000003/manifest.json: permission denied"
    ]
