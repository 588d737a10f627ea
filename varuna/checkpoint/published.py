"""A folder that servers watch: publications appear in it whole, and ``latest`` leads to the newest one.

::

    <folder>/
        step-00000100/                 whole, as are all that have such a name
        step-00000200/
        latest -> step-00000200
        .step-00000300.7-5f0c/         being written; no other name begins with a dot but these:
        .turn  .lock                   who may publish: a number that each generation makes greater by one

A rank that publishes has a *turn*. One that belongs to an older generation than another's is over, and cannot publish
any more, however late its process wakes up.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from varuna.checkpoint.names import parse_step, step_folder
from varuna.core.errors import CheckpointError
from varuna.process.file_lock import locked

LATEST = "latest"
_LOCK, _TURN = ".lock", ".turn"
_WRITTEN, _OLD = ".step-", ".old-"
_LOCK_BOUND_S, _PAUSE_S = 5.0, 0.05
"""Bound on the wait for the lock, whose holder renames some folders; a process that stands still may hold it longer."""


class PublishedFolder:
    """The folder in which a run publishes; in each generation one rank writes to it.

    Args:
        path: of the folder.
        keep: number of newest publications to keep.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep

    def prepare(self) -> None:
        """Make the folder, and see that it can be written.

        Raises:
            CheckpointError: it cannot.
        """
        probe = self.path / f".probe-{secrets.token_hex(4)}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise unpublished(self.path, error) from error

    def take_turn(self) -> str:
        """Take a turn, which ends all before it.

        Raises:
            CheckpointError: the folder cannot be written, or is locked for long.
        """
        try:
            with self._locked():
                turn = f"{_number(self._turn()) + 1}-{secrets.token_hex(4)}"
                new = self.path / f"{_TURN}.new"
                new.write_text(turn)
                sync(new)
                new.replace(self.path / _TURN)
                sync(self.path)
            return turn
        except OSError as error:
            raise unpublished(self.path, error) from error

    def begin(self, step: int, turn: str, before: int | None = None) -> Path:
        """Make a hidden folder for a publication, which all ranks with this turn share; what others left goes.

        Args:
            step: that is to be published.
            turn: of this generation.
            before: the step published before this one, which another rank may still be completing.

        Raises:
            OSError: it cannot be made.
        """
        mine, *others = (f"{_WRITTEN}{each:08d}.{turn}" for each in (step, before) if each is not None)
        (self.path / mine).mkdir(parents=True, exist_ok=True)
        for entry in self.path.iterdir() if self._turn() == turn else ():
            if entry.name.startswith((_WRITTEN, _OLD)) and entry.name not in (mine, *others):
                shutil.rmtree(entry, ignore_errors=True)
        return self.path / mine

    def publish(self, written: Path, step: int, turn: str) -> bool:
        """Let a complete folder appear under its name and as the newest, and remove old ones; False: the turn is over.

        Raises:
            CheckpointError: the folder cannot be written, or is locked for long.
        """
        name = step_folder(step)
        try:
            for file in sorted(written.iterdir()):
                sync(file)
            sync(written)
            with self._locked():
                if self._turn() != turn:
                    return False
                replaced = (self.path / name).exists()  # of an older generation, or of an earlier run
                old = [self._set_aside(self.path / name)] if replaced else []
                written.rename(self.path / name)
                self._point_at(name)
                sync(self.path)
                old += self._set_aside_old(step)
        except OSError as error:
            if self._turn() != turn:  # and the rank that has it now has cleaned up
                return False
            raise unpublished(self.path, error) from error
        for folder in old:  # large ones take their time, without the lock
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _point_at(self, name: str) -> None:
        new = self.path / f".{LATEST}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(name, target_is_directory=True)
        new.replace(self.path / LATEST)

    def _set_aside_old(self, newest: int) -> list[Path]:
        """Hide all but the newest; those of later steps are of what the run went back from, or of another run."""
        known = {step: entry for entry in self.path.iterdir() if (step := parse_step(entry.name)) is not None}
        kept = sorted((step for step in known if step <= newest), reverse=True)[: self._keep]
        return [self._set_aside(entry) for step, entry in known.items() if step not in kept]

    def _set_aside(self, folder: Path) -> Path:
        """Hide a folder before parts of it go, so that no server reads it half."""
        return folder.rename(self.path / f"{_OLD}{folder.name}.{secrets.token_hex(4)}")

    def _turn(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.path / _TURN).read_text()
        return ""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with its process.

        Raises:
            CheckpointError: another process has it for long.
        """
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline_s = time.monotonic() + _LOCK_BOUND_S
            while not locked(descriptor):
                if time.monotonic() >= deadline_s:
                    raise CheckpointError(
                        f"{self.path} was locked by another process for {_LOCK_BOUND_S:.0f} s: nothing is published "
                        "there now. If that is another run, give each its own folder."
                    )
                time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(descriptor)


def unpublished(path: Path, error: OSError) -> CheckpointError:
    """Say that nothing can be published there, why, and what to do."""
    return CheckpointError(
        f"cannot publish in {path}: {error.strerror or error}. Check the free space and the permissions there, or give "
        "Publish(path) another folder. Checkpoints are not affected."
    )


def sync(path: Path) -> None:
    """Make a file or a folder durable: a power cut leaves what it holds now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(turn: str) -> int:
    digits = turn.partition("-")[0]
    return int(digits) if digits.isdigit() else 0
