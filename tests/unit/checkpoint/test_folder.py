"""A checkpoint directory is made ready without losing anything, and kept small."""

from hashlib import sha256
from pathlib import Path

import pytest

from varuna.checkpoint.files import shard_name, step_folder, write_atomically
from varuna.checkpoint.folder import prepare, retain
from varuna.checkpoint.manifest import Manifest, commit, manifests, newest_valid
from varuna.core.errors import CheckpointError, UsageError
from varuna.core.messages import SavedShard


def save(directory: Path, step: int) -> Manifest:
    """A checkpoint of one section."""
    content = str(step).encode()
    shard = SavedShard(
        step=step,
        section=0,
        file=shard_name(0, 1),
        size_bytes=len(content),
        sha256=sha256(content).hexdigest(),
    )
    write_atomically(step_folder(directory, step) / shard.file, [content])
    manifest = Manifest(
        run_id="run",
        step=step,
        generation=1,
        model_digest="abc",
        sections=1,
        seed=0,
        global_batch=1,
        micro_batch=1,
        shards=(shard,),
    )
    return commit(directory, manifest)


def abandon(directory: Path, step: int) -> None:
    """Shards without a manifest."""
    write_atomically(step_folder(directory, step) / shard_name(0, 1), [b"half"])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- prepare -----------------------------------------------------------------------------------------


def test_a_directory_is_created_and_left_clean(tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "b")
    prepare(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []


def test_resuming_is_the_default_and_touches_nothing(tmp_path: Path) -> None:
    manifest = save(tmp_path, 10)
    abandon(tmp_path, 20)
    prepare(tmp_path)
    assert newest_valid(tmp_path) == (manifest, [])
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_an_unwritable_directory_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=rf"cannot write {tmp_path}/{name}.*(Not a directory|File exists).*another"
    ):
        prepare(tmp_path / name)


def test_a_fresh_start_refuses_to_overwrite(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"2 checkpoints, the newest after 20 steps.*--new --overwrite"):
        prepare(tmp_path, new=True)
    assert [m.step for m in manifests(tmp_path)] == [20, 10]


def test_a_fresh_start_refuses_to_overwrite_even_a_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (step_folder(tmp_path, 10) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="1 checkpoint, the newest after 10 steps"):
        prepare(tmp_path, new=True)


def test_overwriting_moves_everything_aside_and_deletes_nothing(tmp_path: Path) -> None:
    first = save(tmp_path, 10)
    abandon(tmp_path, 20)
    (tmp_path / "notes.txt").write_text("mine")
    prepare(tmp_path, new=True, overwrite=True)
    second = save(tmp_path, 10)
    prepare(tmp_path, new=True, overwrite=True)
    assert names(tmp_path) == ["notes.txt", "replaced-1", "replaced-2"]
    assert newest_valid(tmp_path) is None
    assert names(tmp_path / "replaced-1") == ["step-00000010", "step-00000020"]
    assert newest_valid(tmp_path / "replaced-1") == (first, [])  # still a checkpoint directory
    assert newest_valid(tmp_path / "replaced-2") == (second, [])


def test_a_crash_while_moving_aside_leaves_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    rename = Path.rename

    def fails_for_the_newest(path: Path, target: Path) -> Path:
        if path.name == "step-00000020":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_newest)
    with pytest.raises(CheckpointError, match=r"cannot move checkpoints to .*replaced-1: Input/output error"):
        prepare(tmp_path, new=True, overwrite=True)
    assert newest_valid(tmp_path) == (newest, [])


def test_a_fresh_start_in_an_empty_directory_needs_no_overwrite(tmp_path: Path) -> None:
    prepare(tmp_path, new=True)
    prepare(tmp_path, new=True, overwrite=True)
    assert names(tmp_path) == []


def test_a_fresh_start_sets_unfinished_folders_aside(tmp_path: Path) -> None:
    abandon(tmp_path, 10)
    prepare(tmp_path, new=True)
    assert names(tmp_path) == ["replaced-1"]


def test_overwrite_alone_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--overwrite goes with --new"):
        prepare(tmp_path, overwrite=True)


# -- retain ------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    assert retain(tmp_path, committed=50) == [20, 10]
    assert [m.step for m in manifests(tmp_path)] == [50, 40, 30]
    assert retain(tmp_path, committed=50, keep=1) == [40, 30]
    assert retain(tmp_path, committed=50, keep=1) == []


def test_unfinished_folders_go_once_a_newer_checkpoint_is_complete(tmp_path: Path) -> None:
    abandon(tmp_path, 5)
    save(tmp_path, 10)
    abandon(tmp_path, 15)
    save(tmp_path, 20)
    abandon(tmp_path, 25)  # may be being written
    assert retain(tmp_path, committed=20) == [15, 5]
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000025"]


def test_a_damaged_checkpoint_does_not_count(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (step_folder(tmp_path, 30) / shard_name(0, 1)).unlink()
    assert retain(tmp_path, committed=40, keep=2) == [10]
    assert newest_valid(tmp_path) is not None


def test_a_run_that_fell_back_keeps_what_it_runs_from(tmp_path: Path) -> None:
    for step in (12, 15, 25, 35):
        save(tmp_path, step)  # those after 12 turned out to be damaged
    assert retain(tmp_path, committed=12, keep=1) == []


def test_nothing_is_removed_unless_the_committed_checkpoint_is_there(tmp_path: Path) -> None:
    save(tmp_path, 10)
    abandon(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"step 20 has no complete checkpoint.*nothing was removed"):
        retain(tmp_path, committed=20, keep=1)
    assert [m.step for m in manifests(tmp_path)] == [10]


def test_a_crash_while_removing_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)

    def crash(_folder: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("varuna.checkpoint.folder.shutil.rmtree", crash)
    with pytest.raises(CheckpointError, match=r"cannot remove .*step-00000010: Device or resource busy"):
        retain(tmp_path, committed=20, keep=1)
    assert manifests(tmp_path) == [newest]
