"""One process at a time in a folder that several could own: a kernel lock, which ends with its holder."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from varuna.core.errors import FleetError
from varuna.core.value import Value

_FILE = "lock"
GOODBYE_S = 5.0
"""Wait for an owner that is just leaving, such as a manager that was told to stop."""
_PAUSE_S = 0.1
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class LockHolder(Value):
    """The process that owns a folder, for messages."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderLock:
    """The lock of one folder, until ``release`` or the end of this process.

    On a network drive the lock is the file server's, as far as it has locks (NFS does, unless mounted with ``nolock``).
    ``warning`` says what cannot be known there.
    """

    def __init__(self, file: IO[bytes], warning: str) -> None:
        self._file = file
        self.warning = warning
        """A warning that the last owner, on another machine, has not released the folder; else empty."""

    def release(self) -> None:
        """Release the folder, and note that this was done on purpose."""
        if not self._file.closed:
            os.ftruncate(self._file.fileno(), 0)
            self._file.close()


def own(
    folder: Path,
    what: str,
    *,
    remedy: str,
    goodbye_s: float = GOODBYE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FolderLock:
    """Become the owner of a folder; waits at most 5 s for one that is just leaving.

    Args:
        folder: exists.
        what: what owners are, such as ``manager``.
        remedy: what to do if there is another owner.
        goodbye_s: how long another owner is waited for.
        clock: seconds.
        sleep: waits.

    Raises:
        FleetError: another process owns it.
        OSError: it cannot be written.
    """
    path, deadline_s = folder / _FILE, clock() + goodbye_s
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    while not locked(file.fileno()):
        if clock() >= deadline_s:
            found = _read(file)
            file.close()
            raise FleetError(f"{folder} is used by another {what}, {found or 'whose process is unknown'}. {remedy}")
        sleep(_PAUSE_S)
    before, me = _read(file), LockHolder(pid=os.getpid(), host=socket.gethostname())
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), me.model_dump_json().encode(), 0)
    gone = before is None or before.host == me.host
    return FolderLock(
        file,
        ""
        if gone
        else f"{folder} was last used by {before}, which did not shut down cleanly: make sure that it has ended",
    )


def is_owned(folder: Path) -> bool:
    """Return whether a folder has an owner now; False if that cannot be known. Holds the lock for a moment."""
    try:
        with (folder / _FILE).open("rb") as file:
            return not locked(file.fileno())
    except OSError:
        return False


def locked(descriptor: int) -> bool:
    """Lock an open file for as long as it stays open; False if another one has. True where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN
    return True


def _read(file: IO[bytes]) -> LockHolder | None:
    try:
        return LockHolder.model_validate_json(os.pread(file.fileno(), 4096, 0))
    except (OSError, ValidationError):
        return None
