"""Shards become checkpoints on a thread that nothing ends but the run; a crash anywhere leaves a checkpoint."""

import threading

import pytest

from tests.unit.checkpoint.saves import (
    make_job,
    make_plan,
    save_parts,
)
from tests.unit.store.flaky import down
from tests.waiting import wait_for
from varuna.checkpoint import committer
from varuna.checkpoint.committer import CheckpointCommitter
from varuna.checkpoint.manifest import mark_damaged, newest_intact, read_manifest, survey
from varuna.checkpoint.names import MANIFEST, step_folder
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.store.base import Entry, Store
from varuna.store.opening import keep_in_memory, open_store
from varuna.testing.stores import HookedStore


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.nodeid}"


def keeper(place: str, warnings: list[str], **changes: int) -> CheckpointCommitter:
    job = make_job().model_copy(update={"checkpoint_dir": place, **changes})
    return CheckpointCommitter(job, new=False, overwrite=False, say=warnings.append, warn=warnings.append)


def kept_twice(store: Store, place: str, warnings: list[str]) -> CheckpointCommitter:
    """One that has committed steps 3 and 6."""
    keep_in_memory(store)
    keep, plan = keeper(place, warnings), make_plan()
    keep.begin(0, plan, first_step=0, rollback=True)
    for step in (3, 6):
        for shard in save_parts(store, step, plan):
            keep.collect(shard)
        assert keep.wait_for(step, 10)
        assert keep.wait_until_settled()
    return keep


def is_given_back(store: Store) -> bool:
    return b'"is_over":true' in store.get(sorted(entry.name for entry in store.entries("lease"))[-1])


def test_complete_steps_are_committed_and_old_ones_go(place: str) -> None:
    warnings: list[str] = []
    keep, plan = keeper(place, warnings, keep_last=2), make_plan(2, 2)
    assert keep.newest() is None
    keep.begin(0, plan, first_step=0, rollback=True)
    for step in (3, 6, 9):
        for shard in save_parts(keep.store, step, plan):
            keep.collect(shard)
    assert keep.wait_for(9, 10)
    assert keep.wait_until_settled()
    assert [folder.step for folder in survey(keep.store)] == [9, 6]
    found = keep.newest()
    assert found is not None
    assert found[0].step == 9
    keep.close()
    assert warnings == []
    assert is_given_back(keep.store)


def test_checkpoints_of_a_run_that_resumes_bear_the_name_of_the_run_that_it_goes_on_with(place: str) -> None:
    plan, names = make_plan(), list[str]()
    for step in (3, 6):
        keep = keeper(place, [])
        found = keep.newest()
        keep.begin(0, plan, first_step=0 if found is None else found[0].step, rollback=True)
        for shard in save_parts(keep.store, step, plan):
            keep.collect(shard)
        assert keep.wait_for(step, 10)
        names.append(read_manifest(keep.store, step).run_id)
        keep.close()
    assert names[0] == names[1]


def test_an_error_nobody_foresaw_costs_one_checkpoint_and_is_said(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    keep, plan = keeper(place, warnings), make_plan()
    keep.begin(0, plan, first_step=0, rollback=True)

    def broken(*args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(committer, "commit", broken)
    for shard in save_parts(keep.store, 3, plan):
        keep.collect(shard)
    assert keep.wait_until_settled()
    monkeypatch.undo()
    for shard in save_parts(keep.store, 6, plan):
        keep.collect(shard)
    assert keep.wait_for(6, 10)
    assert [text for text in warnings if "oops" in text]
    keep.close()


def test_a_false_word_of_a_later_step_costs_no_checkpoint_and_what_was_dropped_is_said(place: str) -> None:
    warnings: list[str] = []
    keep, plan = keeper(place, warnings), make_plan()
    keep.begin(0, plan, first_step=0, rollback=True)
    for shard in save_parts(open_store(f"{place}-elsewhere"), 2400, plan):
        keep.collect(shard)
    _, *rest = save_parts(keep.store, 3, plan)
    for shard in rest:
        keep.collect(shard)
    assert keep.wait_until_settled()
    assert keep.committed_step == -1
    for shard in save_parts(keep.store, 6, plan):
        keep.collect(shard)
    assert keep.wait_for(6, 10)
    assert keep.wait_until_settled()
    missing, dropped = warnings
    assert "2400" in missing
    assert (
        dropped
        == f"{len(rest)} shards of checkpoints before that of step 6 were dropped: other shards of them never came"
    )
    keep.close()


def test_a_run_that_was_replaced_commits_nothing_more(place: str) -> None:
    warnings: list[str] = []
    first, plan = keeper(place, warnings), make_plan()
    first.begin(0, plan, first_step=0, rollback=True)
    second = keeper(place, warnings)
    for shard in save_parts(first.store, 3, plan):
        first.collect(shard)
    assert first.wait_until_settled()
    assert "another run has taken over" in warnings[0]
    assert second.newest() is None
    first.close()
    second.close()


def test_a_folder_that_somebody_empties_is_used_again(place: str) -> None:
    warnings: list[str] = []
    keep, plan = keeper(place, warnings), make_plan()
    keep.begin(0, plan, first_step=0, rollback=True)
    for shard in save_parts(keep.store, 3, plan):
        keep.collect(shard)
    assert keep.wait_for(3, 10)
    assert keep.wait_until_settled()  # nothing of step 3 is under way
    for folder in keep.store.folders():
        keep.store.remove_folder(folder)
    for shard in save_parts(keep.store, 6, plan):
        keep.collect(shard)
    assert keep.wait_for(6, 10)
    assert keep.wait_until_settled()
    assert [folder.step for folder in survey(keep.store)] == [6]
    assert warnings == [f"files were removed from {place} while this run is using it; claiming it again"]
    assert "lease" in keep.store.folders()  # others can see again that this run lives
    keep.close()
    assert is_given_back(keep.store)


class LaggingStore(HookedStore):
    """Its listings show nothing that was written until they catch up."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.after = self._note
        self.late: set[str] = set()

    def _note(self, verb: str, name: str) -> None:
        if verb in ("put", "create", "write"):
            self.late.add(name)

    def folders(self) -> list[str]:
        return sorted({entry.name.split("/")[0] for entry in self.entries() if "/" in entry.name})

    def entries(self, folder: str = "") -> list[Entry]:
        return [entry for entry in super().entries(folder) if entry.name not in self.late]


def test_a_store_whose_listings_lag_gets_checkpoints(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.checkpoint.committer.SHOWN_AGAIN_S", 0.01)
    store = LaggingStore(open_store(place))
    warnings: list[str] = []
    keep = kept_twice(store, place, warnings)
    assert warnings == []
    looks = Looks(keep)
    looks.thread.start()
    wait_for(lambda: bool(warnings), 10)
    assert looks.found == []
    store.late.clear()
    looks.thread.join(10)
    assert looks.found == [6]
    keep.close()


def test_a_checkpoint_is_found_whose_manifest_no_listing_shows_yet(place: str) -> None:
    store = LaggingStore(open_store(place))
    kept_twice(store, place, []).close()
    store.late = {f"{step_folder(6)}/{MANIFEST}"}
    found = newest_intact(store)
    assert found is not None
    assert found[0].step == 6


class HidingStore(HookedStore):
    """Shows no checkpoint while it is hidden, as a mount that went away."""

    is_hidden = False

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.before = self._hide

    def _hide(self, verb: str, name: str) -> None:
        if self.is_hidden and name.startswith("step-") and verb in ("get", "size_bytes", "read_into"):
            raise ObjectMissing(name)

    def folders(self) -> list[str]:
        return [] if self.is_hidden else super().folders()

    def entries(self, folder: str = "") -> list[Entry]:
        return [] if self.is_hidden and folder != "lease" else super().entries(folder)


class Looks:
    """Asks for the newest checkpoint, once on a thread of its own."""

    def __init__(self, keep: CheckpointCommitter) -> None:
        self._keep = keep
        self.found: list[int] = []
        self.thread = threading.Thread(target=self.look)

    def look(self) -> None:
        newest = self._keep.newest()
        self.found.append(-1 if newest is None else newest[0].step)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_empty_folder_does_not_send_a_run_back(
    place: str, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    monkeypatch.setattr("varuna.checkpoint.committer.SHOWN_AGAIN_S", 0.01)
    store = HidingStore(open_store(place))
    warnings: list[str] = []
    keep = kept_twice(store, place, warnings)
    store.is_hidden = True
    if is_restarted:
        keep.close()
        job = make_job().model_copy(update={"checkpoint_dir": place})
        keep = CheckpointCommitter(
            job, new=False, overwrite=False, say=warnings.append, warn=warnings.append, committed_step=6
        )
    assert keep.newest(waits=False) is None  # nobody needs it yet
    looks = Looks(keep)
    looks.thread.start()
    wait_for(lambda: bool(warnings), 10)
    assert "step-00000006 is not there, though this run has committed it: waiting" in warnings[0]
    assert looks.found == []
    store.is_hidden = False
    looks.thread.join(10)
    assert looks.found == [6]
    mark_damaged(store, 6, "somebody says so")
    looks.look()
    assert looks.found == [6, 3]
    assert len(warnings) == 1
    keep.close()


class LyingStore(HookedStore):
    """Returns something else than what is there, for a while."""

    lies = False

    def get(self, name: str) -> bytes:
        found = super().get(name)
        return found[::-1] if self.lies and name.startswith("step-") else found


def test_a_store_that_damages_all_it_is_asked_for_does_not_end_a_run_at_once(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna.checkpoint.committer.SHOWN_AGAIN_S", 0.01)
    store = LyingStore(open_store(place))
    warnings: list[str] = []
    keep = kept_twice(store, place, warnings)
    store.lies = True
    assert keep.newest(waits=False) is None  # nobody needs it yet
    looks = Looks(keep)
    looks.thread.start()
    wait_for(lambda: bool(warnings), 10)
    assert "step-00000006/manifest.json is damaged" in warnings[0]
    assert "it may err" in warnings[0]
    assert looks.found == []
    store.lies = False
    looks.thread.join(10)
    assert (looks.found, len(warnings)) == ([6], 1)
    keep.close()


@pytest.mark.parametrize("is_marked", [False, True])
def test_damage_that_lasts_or_that_somebody_has_marked_is_believed(
    place: str, monkeypatch: pytest.MonkeyPatch, is_marked: bool
) -> None:
    monkeypatch.setattr("varuna.checkpoint.committer.SHOWN_AGAIN_S", 0.01)
    monkeypatch.setattr("varuna.checkpoint.committer.DOUBTED_S", 100.0 if is_marked else 0.1)
    store = LyingStore(open_store(place))
    keep = kept_twice(store, place, [])
    if is_marked:
        mark_damaged(store, 6, "somebody says so")
    store.lies = True
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint in .* is intact"):
        keep.newest()
    keep.close()


def test_a_run_that_was_replaced_by_one_that_is_over_commits_nothing_more(place: str) -> None:
    warnings: list[str] = []
    first, plan = keeper(place, warnings), make_plan()
    first.begin(0, plan, first_step=0, rollback=True)
    second = keeper(place, warnings)
    second.begin(0, plan, first_step=0, rollback=True)
    for shard in save_parts(second.store, 6, plan):
        second.collect(shard)
    assert second.wait_for(6, 10)
    second.close()
    assert is_given_back(first.store)
    for shard in save_parts(first.store, 3, plan):
        first.collect(shard)
    assert first.wait_until_settled()
    assert [text for text in warnings if "step 3 is not committed, because another run has taken over" in text]
    assert [folder.step for folder in survey(first.store) if folder.is_committed] == [6]
    first.close()


def test_a_store_that_is_down_costs_a_checkpoint_and_not_the_next(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = HookedStore(open_store(place))
    monkeypatch.setattr(committer, "open_store", lambda place: hooked)
    warnings: list[str] = []
    keep, plan = keeper(place, warnings), make_plan()
    keep.begin(0, plan, first_step=0, rollback=True)
    found = save_parts(hooked, 3, plan)
    hooked.before = down
    for shard in found:
        keep.collect(shard)
    assert keep.wait_until_settled()
    assert "connection refused" in warnings[0]
    hooked.before = lambda verb, name: None
    for shard in save_parts(hooked, 6, plan):
        keep.collect(shard)
    assert keep.wait_for(6, 10)
    keep.close()
