"""Names of a checkpoint's files, and writing them so that a crash leaves the old file or the new one.

::

    <directory>/
        step-00000010/                  10 steps are committed; step 10 runs next
            section-000.g1.safetensors  saved by generation 1
            section-001.g1.safetensors
            manifest.json               written last: without it the folder is no checkpoint
        replaced-1/                     moved aside by --new --overwrite
"""

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from varuna.core.errors import CheckpointError

MANIFEST = "manifest.json"
START_AFRESH = "--new --overwrite (without `varuna run`: VARUNA_NEW=overwrite)"
_STEP = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"section-(\d{3,})\.g(\d+)\.safetensors")


def step_folder(directory: Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` committed steps."""
    return directory / f"step-{step:08d}"


def step_folders(directory: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints, finished or not, newest first; nothing if there is no directory.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    try:
        entries = [(_STEP.fullmatch(entry.name), entry) for entry in directory.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(directory, error) from error
    return sorted(((int(match[1]), entry) for match, entry in entries if match), reverse=True)


def shard_name(section: int, generation: int) -> str:
    """File of a section; it carries the generation, so that two generations never write the same file."""
    return f"section-{section:03d}.g{generation}.safetensors"


def parse_shard_name(file: str) -> tuple[int, int]:
    """Section and generation of a shard's file name.

    Raises:
        ValueError: it is none; a path is refused too, since names come from other machines.
    """
    match = _SHARD.fullmatch(file)
    if match is None:
        raise ValueError(f"{file!r} is not the file name of a shard, such as {shard_name(3, 1)!r}")
    return int(match[1]), int(match[2])


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write ``path`` durably, creating its folder; on failure nothing is left under its name.

    Raises:
        CheckpointError: a file operation failed, such as on a full disk.
    """
    # Random, since process ids repeat among containers that share the folder.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent.parent)
        try:
            with partial.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable("write", path, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable.

    Raises:
        OSError: the folder cannot be opened or synchronised.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(verb: str, path: Path, error: OSError) -> CheckpointError:
    """Say that ``path`` cannot be changed, why, and what to do."""
    return CheckpointError(
        f"cannot {verb} {path}: {error.strerror or error}. Check the free space and the permissions there, or give "
        f"another checkpoint directory. Checkpoints that are complete are not affected."
    )


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Say that ``path`` cannot be read, and why."""
    return CheckpointError(f"cannot read {path}: {error.strerror or error}")
