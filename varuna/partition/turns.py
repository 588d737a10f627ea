"""One worker at a time on a host, for what needs the memory of a whole model."""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TURN_BOUND_S = 600.0
"""A worker that waits longer goes ahead: the one before may be frozen, and memory may suffice after all."""
_POLL_S = 0.02


@contextmanager
def turn(key: str, bound_s: float = TURN_BOUND_S) -> Iterator[None]:
    """Hold the host's lock of ``key`` during the block; it is freed when the process dies, too.

    The lock belongs to an open file, so threads of one process take turns as well.
    """
    descriptor = _open(Path(tempfile.gettempdir()) / f"varuna-{os.getuid()}-{key[:16]}.lock")
    try:
        if descriptor is not None and not _taken(descriptor, time.monotonic() + bound_s):
            print(
                f"varuna: another worker has been building the model for {bound_s:.0f} s; going on at the same time",
                file=sys.stderr,
                flush=True,
            )
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(path: Path) -> int | None:
    """The lock's file; None where the temporary folder cannot be written, and nobody waits."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _taken(descriptor: int, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
