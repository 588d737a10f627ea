"""Folders that a run writes to: how much room there is, and how long it takes until something is safe."""

import os
import shutil
import tempfile
import time
from collections.abc import Container, Iterable
from functools import partial
from pathlib import Path
from statistics import median

from varuna.extras.doctor.judging.facts import FolderFacts
from varuna.process.bounded import Bounded

BOUND_S = 8.0
_SMALL = b"\0" * 4096
_SYNCS = 5
_LARGE_BYTES = 32 << 20
_PART_BYTES = 1 << 20
_WRITE_S = 2.0


def look_at_folders(places: dict[str, Path], needed: Container[str]) -> tuple[FolderFacts, ...]:
    """Try the folder of each use; those on one file system are tried once, as the first of them."""
    looking = [(use, path, Bounded(partial(_look, use, path))) for use, path in _distinct(places)]
    found = []
    deadline_s = time.monotonic() + BOUND_S
    for use, path, work in looking:
        try:
            facts = work.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            problem = f"it did not answer within {BOUND_S:.0f} s: a network drive that is away?"
            facts = FolderFacts(use=use, path=str(path), problem=problem)
        found.append(facts.model_copy(update={"needed": use in needed}))
    return tuple(found)


def _distinct(places: dict[str, Path]) -> Iterable[tuple[str, Path]]:
    seen = set()
    for use, path in places.items():
        try:
            device = _existing(path).stat().st_dev
        except OSError:
            yield use, path
            continue
        if device not in seen:
            seen.add(device)
            yield use, path


def _existing(path: Path) -> Path:
    """Return the folder, or the nearest one above it that is there: a run makes the rest."""
    return next((each for each in (path.absolute(), *path.absolute().parents) if each.exists()), path)


def _look(use: str, path: Path) -> FolderFacts:
    facts = FolderFacts(use=use, path=str(path))
    try:
        folder = _existing(path)
        usage = shutil.disk_usage(folder)
        facts = facts.model_copy(update={"free_bytes": usage.free, "size_bytes": usage.total})
        if folder.is_file():
            return facts.model_copy(update={"problem": f"{folder} is a file"})
        with tempfile.TemporaryFile(dir=folder, prefix=".varuna-doctor-", buffering=0) as file:
            sync_s = _sync_s(file.fileno())
            facts = facts.model_copy(update={"sync_s": sync_s})
            if usage.free > 4 * _LARGE_BYTES:
                facts = facts.model_copy(update={"write_bytes_per_s": _write(file.fileno())})
    except OSError as error:
        return facts.model_copy(update={"problem": f"cannot write: {error.strerror}"})
    return facts


def _sync_s(file: int) -> float:
    taken_s = []
    for _ in range(_SYNCS):
        begin_s = time.monotonic()
        os.write(file, _SMALL)
        os.fsync(file)
        taken_s.append(time.monotonic() - begin_s)
    return median(taken_s)


def _write(file: int) -> float:
    part, written, begin_s = os.urandom(_PART_BYTES), 0, time.monotonic()
    while written < _LARGE_BYTES and time.monotonic() - begin_s < _WRITE_S:
        written += os.write(file, part)
    os.fsync(file)
    return written / max(time.monotonic() - begin_s, 1e-9)
