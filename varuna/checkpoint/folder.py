"""Care for a checkpoint directory: make it ready for a run, and remove what is old."""

import shutil
from itertools import count
from pathlib import Path

from varuna.checkpoint.files import (
    MANIFEST,
    START_AFRESH,
    step_folder,
    step_folders,
    sync_folder,
    unwritable,
    write_atomically,
)
from varuna.checkpoint.manifest import committed_folders, read_manifest
from varuna.core.errors import CheckpointError, UsageError

_PROBE = ".writable"


def prepare(directory: Path, *, new: bool = False, overwrite: bool = False) -> None:
    """Create the directory, check that it can be written, and make room for a fresh run if asked.

    Args:
        directory: the checkpoint directory.
        new: start afresh; refused if there are checkpoints.
        overwrite: with ``new``: move them to ``replaced-<n>`` inside the directory. Nothing is deleted.

    Raises:
        CheckpointError: the directory cannot be written, or has checkpoints and ``new`` comes without ``overwrite``.
        UsageError: ``overwrite`` without ``new``.
    """
    if overwrite and not new:
        raise UsageError("--overwrite goes with --new only: without --new the run continues from its checkpoints")
    probe = directory / _PROBE
    try:
        write_atomically(probe, [b""])
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable("write", probe, error) from error
    if not new:
        return
    saved = committed_folders(directory)
    if saved and not overwrite:
        raise CheckpointError(
            f"a new run was asked for, but {directory} has {len(saved)} checkpoint{'s' * (len(saved) > 1)}, the newest "
            f"after {saved[0][0]} steps. Use {START_AFRESH} to move them aside, give another checkpoint "
            f"directory, or leave out --new (VARUNA_NEW) to continue."
        )
    _move_aside(directory)


def _move_aside(directory: Path) -> None:
    """Move all step folders to the first free ``replaced-<n>``.

    Oldest first: after a crash half-way the directory still resumes from the newest checkpoint.

    Raises:
        CheckpointError: a folder cannot be moved.
    """
    folders = step_folders(directory)
    if not folders:
        return
    target = next(path for n in count(1) if not (path := directory / f"replaced-{n}").exists())
    try:
        target.mkdir()
        for _, folder in reversed(folders):
            folder.rename(target / folder.name)
        sync_folder(target)
        sync_folder(directory)
    except OSError as error:
        raise unwritable("move checkpoints to", target, error) from error


def retain(directory: Path, *, committed: int, keep: int = 3) -> list[int]:
    """Remove checkpoints that are no longer needed; returns their steps, newest first.

    Kept are the one of step ``committed``, the ``keep - 1`` newest complete ones before it, and everything after
    it: a run that fell back behind a damaged checkpoint still has newer folders. Unfinished folders before
    ``committed`` go, since their missing shards will not come.

    Args:
        directory: the checkpoint directory.
        committed: step whose checkpoint is known to be intact, since it was just committed or restored.
        keep: number of complete checkpoints to keep, at least 1.

    Raises:
        CheckpointError: ``committed`` has no manifest, or a folder cannot be removed.
    """
    if not _looks_complete(step_folder(directory, committed)):
        raise CheckpointError(f"step {committed} has no complete checkpoint in {directory}: nothing was removed")
    removed: list[int] = []
    kept = 1
    for step, folder in step_folders(directory):
        if step >= committed:
            continue
        unfinished = not (folder / MANIFEST).exists()
        if kept < keep and not unfinished:
            kept += _looks_complete(folder)
            continue
        try:
            # Without its manifest a folder is no checkpoint: a crash in between leaves nothing half-valid.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            raise unwritable("remove", folder, error) from error
        removed.append(step)
    return removed


def _looks_complete(folder: Path) -> bool:
    """A readable manifest and all its shards with their sizes; hashes are left to those who restore."""
    try:
        return all((folder / shard.file).stat().st_size == shard.size_bytes for shard in read_manifest(folder).shards)
    except (CheckpointError, OSError):
        return False
