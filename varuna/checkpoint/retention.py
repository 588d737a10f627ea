"""The choice of checkpoints to keep, and the preparation of a directory for a run."""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from varuna.checkpoint.manifest import StepFolder, check_present, read_manifest, survey
from varuna.checkpoint.names import MANIFEST, START_AFRESH, step_folder
from varuna.checkpoint.saved_sums import remove_sums
from varuna.core.errors import CheckpointError, StoreError, StoreUnavailable, UsageError
from varuna.store.base import Store


class Kept(NamedTuple):
    """Checkpoints to keep: the newest ``last`` complete ones, and those whose step is a multiple of ``every``."""

    last: int = 3
    every: int | None = None


def superfluous(
    folders: Sequence[tuple[int, bool]], committed: int, kept: Kept, proven: int | None = None
) -> list[int]:
    """Choose the steps whose folders may go, newest first. Pure.

    The one of step ``committed`` and all later folders stay: those are being written, or are damaged, and
    the run will come there again. Unfinished ones before it go, since their missing shards will not come.

    Args:
        folders: (step, whether it is complete) of all folders.
        committed: step whose checkpoint is known to be intact, since it was just committed or restored.
        kept: the user's settings.
        proven: step of the newest checkpoint that was seen whole, or resumed from. It stays, as one more if need be:
            until a newer one is seen whole too, it is not known whether that can be used.
    """
    # 1: the one of ``committed`` itself.
    going, staying = [], 1
    for step, is_complete in sorted(folders, reverse=True):
        if step >= committed:
            continue
        if is_complete and staying < kept.last:
            staying += 1
        elif not (is_complete and (step == proven or (kept.every is not None and step % kept.every == 0))):
            going.append(step)
    return going


def retain(store: Store, committed: int, kept: Kept, proven: int | None = None) -> list[int]:
    """Remove checkpoints that are no longer needed, by ``superfluous``; returns their steps, newest first.

    Sums of gradients go from all before ``committed``: their steps are over.

    Raises:
        CheckpointError: ``committed`` has no complete checkpoint, so nothing was removed.
        StoreError: a folder cannot be removed; all others were, unless the store does not answer.
    """
    complete: list[tuple[int, bool]] = []
    checked = 0  # manifests are read only as far back as they are counted
    folders = survey(store)
    if not any(folder.step == committed and folder.is_committed for folder in folders):
        # It was just committed, and the listing lags: what is in it is asked for by its name.
        folders = [folder for folder in folders if folder.step != committed] + [StepFolder(committed, {MANIFEST: 0})]
        folders.sort(reverse=True)
    for folder in folders:
        is_counted = checked < kept.last or folder.step == proven
        is_complete = folder.is_committed and (not is_counted or _looks_complete(store, folder))
        complete.append((folder.step, is_complete))
        checked += is_complete and folder.step <= committed
    if (committed, True) not in complete:
        raise CheckpointError(f"step {committed} has no complete checkpoint in {store.url}: nothing was removed")
    going = superfluous(complete, committed, kept, proven)
    trouble: StoreError | None = None
    for step in going:
        try:
            # Without its manifest a folder is not a checkpoint: a crash in between leaves nothing half-valid.
            store.remove(f"{step_folder(step)}/{MANIFEST}")
            store.remove_folder(step_folder(step))
        except StoreUnavailable:
            raise
        except StoreError as error:
            trouble = trouble or error
    for folder in folders:
        if folder.step < committed and folder.step not in going:
            remove_sums(store, folder)
    if trouble is not None:
        raise trouble
    return going


def _looks_complete(store: Store, folder: StepFolder) -> bool:
    """Return whether it has a readable manifest, all shards with their sizes, and no mark of damage."""
    if not folder.is_committed or folder.is_damaged:
        return False
    try:
        check_present(store, folder, read_manifest(store, folder.step).shards)
    except StoreUnavailable:
        raise
    except CheckpointError:
        return False
    return True


def prepare(store: Store, *, new: bool = False, overwrite: bool = False) -> None:
    """Make room for a fresh run if asked; else leave everything as it is.

    Args:
        store: the checkpoint directory.
        new: start afresh; refused if there are checkpoints.
        overwrite: with ``new``: move them to ``replaced-<n>`` inside the directory. Nothing is deleted.

    Raises:
        CheckpointError: the directory has checkpoints and ``new`` comes without ``overwrite``.
        UsageError: ``overwrite`` without ``new``.
        StoreError: the directory cannot be read or changed.
    """
    if overwrite and not new:
        raise UsageError("--overwrite requires --new: without --new the run continues from its checkpoints")
    if not new:
        return
    folders = survey(store)
    saved = [folder.step for folder in folders if folder.is_committed]
    if saved and not overwrite:
        raise CheckpointError(
            f"a new run was requested, but {store.url} has {len(saved)} checkpoint{'s' * (len(saved) > 1)}, the "
            f"newest after {saved[0]} steps. Use {START_AFRESH} to move them aside, use another checkpoint "
            "directory, or leave out --new (VARUNA_NEW) to continue."
        )
    if folders:
        taken = set(store.folders())
        target = next(name for n in count(1) if (name := f"replaced-{n}") not in taken)
        for folder in reversed(folders):  # oldest first: after a crash half-way the newest is still there
            store.rename_folder(step_folder(folder.step), f"{target}/{step_folder(folder.step)}")
