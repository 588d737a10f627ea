"""What was committed is read back: whatever is wrong with it is found, and a store that fails costs nothing else."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import make_job, make_plan, save, save_parts
from tests.unit.store.flaky import Time, down
from tests.waiting import wait_for
from varuna.checkpoint import committer
from varuna.checkpoint.committer import CheckpointCommitter
from varuna.checkpoint.manifest import Manifest, look
from varuna.checkpoint.names import DAMAGED, MANIFEST, step_folder
from varuna.checkpoint.verifier import ReadBack, Verifier, read_back
from varuna.core.errors import StoreError
from varuna.store.base import Store
from varuna.store.opening import open_store
from varuna.store.retry import RetryingStore, impatient
from varuna.testing.stores import HookedStore


def change(store: Store, name: str, at: int) -> None:
    """Another byte at this place; -1 is the last one."""
    data = bytearray(store.get(name))
    data[at] ^= 1
    store.put(name, bytes(data))


def files(manifest: Manifest) -> list[str]:
    return [f"{step_folder(manifest.step)}/{shard.file}" for shard in manifest.shards]


def test_a_small_checkpoint_is_read_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = save(store, 3, 2, 2)
    found = read_back(store, manifest)
    assert found == ReadBack(3, manifest.size_bytes, manifest.size_bytes)


def test_one_wrong_byte_anywhere_in_any_part_is_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = save(store, 3, 2, 2)
    for name in files(manifest):
        whole = store.get(name)
        for at in {0, 9, len(whole) // 2, len(whole) - 1}:
            change(store, name, at)
            found = read_back(store, manifest)
            assert found is not None
            assert name in found.damage
            assert "is damaged" in found.damage
            store.put(name, whole)
    assert read_back(store, manifest) == ReadBack(3, manifest.size_bytes, manifest.size_bytes)


def test_a_part_that_is_gone_or_short_and_a_wrong_manifest_are_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = save(store, 3, 1, 2)
    name = files(manifest)[1]
    whole = store.get(name)
    store.put(name, whole[:-1])
    assert "expected" in damage_of(store, manifest)
    store.remove(name)
    assert "is missing" in damage_of(store, manifest)
    store.put(name, whole)
    change(store, f"step-00000003/{MANIFEST}", 40)
    assert "checksum does not match" in damage_of(store, manifest)


def damage_of(store: Store, manifest: Manifest) -> str:
    found = read_back(store, manifest)
    assert found is not None
    return found.damage


def test_a_checkpoint_that_is_gone_or_another_one_by_now_is_nobodys_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = save(store, 3)
    assert read_back(store, manifest.model_copy(update={"writer": "another"})) is None
    store.remove(f"step-00000003/{MANIFEST}")
    assert read_back(store, manifest) is None


def test_no_more_is_read_than_allowed_and_chance_comes_everywhere(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = save(store, 3, 2, 2)
    name = files(manifest)[-1]
    change(store, name, -1)
    hooked, bound = HookedStore(store), manifest.size_bytes // 3
    read = 0

    def count(verb: str, name: str) -> None:
        nonlocal read
        read += verb == "read_into"

    hooked.before = count
    found = [read_back(hooked, manifest, most_bytes=bound, draw=random.Random(seed)) for seed in range(60)]
    assert all(each is not None and each.read_bytes <= bound for each in found)
    assert 5 < sum(bool(each and each.damage) for each in found) < 55
    assert read < 60 * 2 * len(manifest.shards)  # pieces side by side are read together


def test_time_that_is_over_leaves_what_was_read_and_nothing_read_is_nothing_verified(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = save(store, 3, 2, 2)
    asked = iter([False, False, True])
    found = read_back(store, manifest, is_over=lambda: next(asked))
    assert found is not None
    assert 0 < found.read_bytes < found.total_bytes
    assert read_back(store, manifest, is_over=lambda: True) is None


class Run:
    """A run's committer, what it said, and the store that it believes to be at its place."""

    def __init__(
        self, keep: CheckpointCommitter, store: HookedStore, warnings: list[str], found: list[ReadBack]
    ) -> None:
        self.keep, self.store, self.warnings, self.found = keep, store, warnings, found
        self.plan = make_plan(1, 2)
        keep.newest()
        keep.begin(0, self.plan, first_step=0, rollback=True)

    def save(self, step: int) -> None:
        for shard in save_parts(self.store.inner, step, self.plan):
            self.keep.collect(shard)
        assert self.keep.wait_for(step, 10)

    def quiet(self) -> None:
        """Nothing is under way."""
        assert self.keep.settle()
        assert self.keep.verifier.wait(10)
        assert self.keep.settle()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    hooked = HookedStore(open_store(tmp_path))
    monkeypatch.setattr(committer, "open_store", lambda place: hooked)
    monkeypatch.setattr(committer, "VERIFY_BOUND_S", 0.2)
    warnings: list[str] = []
    found: list[ReadBack] = []
    job = make_job().model_copy(update={"checkpoint_dir": str(tmp_path)})
    keep = CheckpointCommitter(
        job, new=False, overwrite=False, say=warnings.append, warn=warnings.append, verified=found.append
    )
    yield Run(keep, hooked, warnings, found)
    keep.close()


def test_each_checkpoint_is_read_back_after_its_commit(run: Run) -> None:
    for step in (3, 6):
        run.save(step)
        run.quiet()
    assert [(each.step, each.read_bytes == each.total_bytes, each.damage) for each in run.found] == [
        (3, True, ""),
        (6, True, ""),
    ]
    assert run.warnings == []


@contextmanager
def spoilt(run: Run, spoil: Callable[[str], None]) -> Iterator[None]:
    """What is in the store changes as soon as it is committed."""

    def after(verb: str, name: str) -> None:
        if verb == "create" and name.endswith(MANIFEST):
            spoil(sorted(entry.name for entry in run.store.inner.entries(name.partition("/")[0]))[2])

    run.store.after = after
    yield
    run.store.after = lambda verb, name: None


@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_damaged_checkpoint_is_marked_and_the_run_goes_on_with_the_one_before(run: Run, how: str) -> None:
    inner = run.store.inner
    run.save(3)
    run.quiet()
    with spoilt(run, (lambda name: change(inner, name, -1)) if how == "changed" else inner.remove):
        run.save(6)
        run.quiet()
    assert run.found[-1].damage
    assert (run.found[-1].step, run.found[-1].instead) == (6, 3)
    (warning,) = [text for text in run.warnings if "the checkpoint of step 6 is damaged" in text]
    assert "goes back to the checkpoint of step 3" in warning
    assert look(inner, 6).is_damaged
    assert run.keep.committed_step == 3
    assert run.keep.wait_for(6, 0)  # whoever waits for the commit is not held up
    found = run.keep.newest()
    assert found is not None
    assert found[0].step == 3
    run.save(9)
    run.quiet()
    assert (run.found[-1].step, run.found[-1].damage, run.keep.committed_step) == (9, "", 9)


def test_without_another_checkpoint_that_is_said(run: Run) -> None:
    with spoilt(run, lambda name: change(run.store.inner, name, -1)):
        run.save(3)
        run.quiet()
    assert "No other checkpoint is whole" in run.warnings[0]
    assert (run.found[0].instead, run.keep.committed_step) == (None, -1)


def test_a_store_that_hangs_while_it_is_read_holds_nothing_up(run: Run) -> None:
    let, asked = threading.Event(), threading.Event()

    def hang(verb: str, name: str) -> None:
        if verb == "read_into":
            asked.set()
            assert let.wait(60)

    run.store.before = hang
    run.save(3)
    assert asked.wait(10)
    for step in (6, 9):
        run.save(step)
    assert run.keep.settle()
    assert run.keep.committed_step == 9
    assert run.found == []
    run.keep.close()
    let.set()
    assert run.keep.verifier.wait(10)
    assert run.found == []  # it came too late
    assert run.warnings == []


def test_a_store_that_hangs_for_long_is_named_once(tmp_path: Path) -> None:
    store, time, let = HookedStore(open_store(tmp_path)), Time(), threading.Event()
    first, second = save(store, 3), save(store, 6)

    def hang(verb: str, name: str) -> None:
        if verb == "read_into":
            assert let.wait(60)

    store.before = hang
    warnings: list[str] = []
    found: list[int] = []
    seen = Verifier(store, found=lambda manifest, each: found.append(each.step), warn=warnings.append, clock=time.clock)
    seen.begin(first)
    wait_for(lambda: seen._under_way is not None, 10)
    time.now_s = 1000.0
    seen.begin(second)
    seen.begin(second)
    assert warnings == [
        "the checkpoint of step 3 cannot be read back: no answer for 120 s. It was committed, and training goes on; "
        "whether it can be used is not known."
    ]
    let.set()
    assert seen.wait(10)
    assert found[-1] == 6
    seen.close()


def test_a_store_that_may_not_be_read_leaves_checkpoints_unverified_and_says_so_once(run: Run) -> None:
    def forbidden(verb: str, name: str) -> None:
        if verb == "read_into":
            raise StoreError(f"cannot read {name}: permission denied")

    run.store.before = forbidden
    for step in (3, 6):
        run.save(step)
        run.quiet()
    (warning,) = run.warnings
    assert "the checkpoint of step 3 cannot be read back" in warning
    assert "permission denied" in warning
    assert run.found == []
    assert run.keep.committed_step == 6
    assert not any(look(run.store.inner, step).is_damaged for step in (3, 6))
    run.store.before = lambda verb, name: None
    run.save(9)
    run.quiet()
    assert [each.step for each in run.found] == [9]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_marked(run: Run) -> None:
    inner = run.store.inner

    def remove(verb: str, name: str) -> None:
        if verb == "read_into":
            inner.remove(f"{name.partition('/')[0]}/{MANIFEST}")
            inner.remove_folder(name.partition("/")[0])

    run.store.before = remove
    run.save(3)
    run.quiet()
    assert run.found == []
    assert [text for text in run.warnings if "damaged" in text] == []
    assert not any(entry.name.endswith(DAMAGED) for entry in inner.entries())


def test_damage_that_cannot_be_marked_is_said(run: Run) -> None:
    def read_only(verb: str, name: str) -> None:
        if verb == "create" and name.endswith(DAMAGED):
            raise StoreError("read-only file system")

    run.store.before = read_only
    with spoilt(run, lambda name: change(run.store.inner, name, -1)):
        run.save(3)
        run.quiet()
    assert "cannot be marked (read-only file system)" in run.warnings[0]


def test_checkpoints_that_rescue_a_run_are_not_read_back(tmp_path: Path) -> None:
    found: list[ReadBack] = []
    job = make_job().model_copy(update={"checkpoint_dir": str(tmp_path), "rescues": True})
    keep = CheckpointCommitter(
        job, new=False, overwrite=False, say=lambda text: None, warn=lambda text: None, verified=found.append
    )
    plan = make_plan()
    keep.begin(0, plan, first_step=0, rollback=True)
    for shard in save_parts(keep.store, 3, plan):
        keep.collect(shard)
    assert keep.wait_for(3, 10)
    keep.close()
    assert found == []


def test_a_store_that_is_asked_impatiently_is_asked_in_silence(tmp_path: Path) -> None:
    time, said = Time(), list[str]()
    inner = HookedStore(open_store(tmp_path))
    inner.before = down
    patient = RetryingStore(inner, clock=time.clock, sleep=time.sleep, say=said.append)
    quick = impatient(patient, 0.0)
    with pytest.raises(StoreError, match="connection refused"):
        quick.get("a")
    assert said == []
    assert impatient(inner, 1.0) is inner


def test_how_far_an_unfinished_checkpoint_is(run: Run) -> None:
    saved = save_parts(run.store.inner, 3, run.plan)
    assert run.keep.gathered is None
    for shard in saved[:2]:
        run.keep.collect(shard)
    assert run.keep.settle()
    gathered = run.keep.gathered
    assert gathered is not None
    assert (gathered.step, gathered.parts, gathered.of) == (3, 2, None)  # no other section has told
    for shard in saved[2:-1]:
        run.keep.collect(shard)
    assert run.keep.settle()
    gathered = run.keep.gathered
    assert gathered is not None
    assert (gathered.parts, gathered.of) == (len(saved) - 1, len(saved))
    run.keep.collect(saved[-1])
    assert run.keep.wait_for(3, 10)
    assert run.keep.gathered is None
