"""One worker at a time on a host, for work that needs the memory of a whole model."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from varuna.process.console import say
from varuna.process.file_lock import locked

TURN_BOUND_S = 600.0
"""A worker that waits longer goes ahead: the holder may be frozen, and memory may suffice after all."""
_POLL_S = 0.02


@contextmanager
def turn(key: str, bound_s: float = TURN_BOUND_S, doing: str = "building the model") -> Iterator[None]:
    """Hold the host's lock of ``key`` during the block, ``doing`` something; it is freed when the process dies, too.

    The lock belongs to an open file, so threads of one process take turns as well. Its holder removes the file.
    """
    path = Path(tempfile.gettempdir()) / f"varuna-{os.getuid()}-{key[:16]}.lock"
    try:
        descriptor = _taken(path, time.monotonic() + bound_s)
        if descriptor is None:
            say(f"another worker has been {doing} for {bound_s:.0f} s; continuing at the same time")
    except OSError:  # the temporary folder cannot be written: no one waits
        descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _taken(path: Path, deadline_s: float) -> int | None:
    """Open the file at ``path`` and lock it; None if another worker holds it for too long."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if locked(descriptor) and _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the holder before has not removed this file between its opening and its locking."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
