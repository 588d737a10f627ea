"""Old checkpoints go, the newest complete one never does, and nothing is overwritten unasked."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.checkpoint.saves import make_plan, save, save_parts
from varuna.checkpoint.manifest import mark_damaged, newest_intact, survey
from varuna.checkpoint.names import MANIFEST, step_folder
from varuna.checkpoint.retention import Kept, prepare, retain, superfluous
from varuna.core.errors import CheckpointError, StoreError, UsageError
from varuna.store.base import Store
from varuna.store.opening import open_store


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.nodeid}")


def steps(store: Store) -> list[int]:
    return [folder.step for folder in survey(store)]


def test_the_newest_stay_and_unfinished_ones_before_them_go() -> None:
    folders = [(step, step != 30) for step in range(10, 80, 10)]
    assert superfluous(folders, 60, Kept(last=3)) == [30, 20, 10]
    assert superfluous(folders, 60, Kept(last=1)) == [50, 40, 30, 20, 10]


def test_multiples_stay_for_good_if_they_are_complete() -> None:
    folders = [(step, step != 20) for step in range(10, 80, 10)]
    assert superfluous(folders, 70, Kept(last=2, every=20)) == [50, 30, 20, 10]


def test_the_one_that_was_read_back_stays_as_one_more() -> None:
    folders = [(step, step != 30) for step in range(10, 80, 10)]
    assert superfluous(folders, 70, Kept(last=1), proven=50) == [60, 40, 30, 20, 10]
    assert superfluous(folders, 70, Kept(last=2), proven=10) == [50, 40, 30, 20]
    assert superfluous(folders, 70, Kept(last=3), proven=60) == [40, 30, 20, 10]
    assert superfluous(folders, 70, Kept(last=1), proven=30) == [60, 50, 40, 30, 20, 10]  # damaged since


@given(
    st.dictionaries(st.integers(0, 50), st.booleans(), min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(0, 50),
)
def test_whatever_goes_enough_complete_ones_stay(
    found: dict[int, bool], last: int, every: int | None, proven: int | None
) -> None:
    complete = sorted((step for step, is_complete in found.items() if is_complete), reverse=True)
    if not complete:
        return
    going = superfluous(list(found.items()), complete[0], Kept(last, every), proven)
    assert not set(going) & {*complete[:last], *(step for step in complete if step == proven)}
    assert all(step < complete[0] for step in going)
    if every is not None:
        assert not [step for step in going if found[step] and step % every == 0]
    else:
        assert len(found) - len(going) - sum(step > complete[0] for step in found) <= last + 1


def test_a_damaged_checkpoint_does_not_count(store: Store) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    mark_damaged(store, 3, "x")
    store.put(f"{step_folder(2)}/{MANIFEST}", b"{}")
    save_parts(store, 5, make_plan())
    assert retain(store, 4, Kept(last=2)) == [3, 2]
    assert steps(store) == [5, 4, 1]


def test_one_that_was_read_back_and_is_damaged_since_does_not_stay(store: Store) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    mark_damaged(store, 2, "x")
    assert retain(store, 3, Kept(last=1), proven=2) == [2, 1]
    assert retain(store, 4, Kept(last=1), proven=3) == []
    assert steps(store) == [4, 3]


def test_a_run_that_fell_back_keeps_what_it_runs_from(store: Store) -> None:
    for step in (1, 2, 3, 9):
        save(store, step)
    assert retain(store, 3, Kept(last=1)) == [2, 1]
    assert steps(store) == [9, 3]


def test_nothing_is_removed_unless_the_committed_checkpoint_is_there(store: Store) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.remove(f"{step_folder(3)}/{MANIFEST}")
    with pytest.raises(CheckpointError, match="nothing was removed"):
        retain(store, 3, Kept(last=1))
    assert steps(store) == [3, 2, 1]


def test_a_link_is_not_followed_and_keeps_no_other_checkpoint_from_going(tmp_path: Path) -> None:
    store, elsewhere = open_store(tmp_path / "run"), open_store(tmp_path / "elsewhere")
    save(elsewhere, 2)
    for step in (1, 3, 4):
        save(store, step)
    (tmp_path / "run" / step_folder(2)).symlink_to(tmp_path / "elsewhere" / step_folder(2))
    with pytest.raises(StoreError, match=f"{step_folder(2)} is a link, and nothing is removed through links"):
        retain(store, 4, Kept(1))
    assert [folder.step for folder in survey(elsewhere) if folder.is_committed] == [2]
    assert [folder.step for folder in survey(store)] == [4, 2]


def test_resuming_is_the_default_and_touches_nothing(store: Store) -> None:
    save(store, 1)
    before = store.entries()
    prepare(store)
    assert store.entries() == before


def test_a_fresh_start_refuses_to_overwrite_even_a_damaged_checkpoint(store: Store) -> None:
    save(store, 1)
    save(store, 2)
    mark_damaged(store, 2, "x")
    with pytest.raises(CheckpointError, match=r"has 2 checkpoints, the newest after 2 steps.*--new --overwrite"):
        prepare(store, new=True)


def test_overwriting_moves_everything_aside_and_deletes_nothing(store: Store) -> None:
    for _ in range(2):
        save(store, 1)
        save_parts(store, 2, make_plan())
        before = len(store.entries())
        prepare(store, new=True, overwrite=True)
        assert steps(store) == []
        assert len(store.entries()) == before
    assert store.folders() == ["replaced-1", "replaced-2"]


def test_a_crash_while_moving_aside_leaves_the_newest_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(store, step)
    moved: list[str] = []
    rename = type(store).rename_folder

    def die_second(self: Store, old: str, new: str) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(old)
        rename(store, old, new)

    monkeypatch.setattr(type(store), "rename_folder", die_second)
    with pytest.raises(KeyboardInterrupt):
        prepare(store, new=True, overwrite=True)
    found = newest_intact(store)
    assert found is not None
    assert found[0].step == 3


def test_a_fresh_start_in_an_empty_directory_needs_no_overwrite(store: Store) -> None:
    prepare(store, new=True)


def test_overwrite_alone_is_a_mistake(store: Store) -> None:
    with pytest.raises(UsageError, match="--overwrite requires --new"):
        prepare(store, overwrite=True)
