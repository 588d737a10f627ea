"""Room on a disk for what must be written though others have filled it."""

import contextlib
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 24 * 2**20
"""For a decision, and the rows that may wait before it (``journal.WAITING_BYTES``)."""
_LEAVES = 4
"""A disk with less room than so many times the reserve keeps none: it would be what fills it."""


class Reserve:
    """A file whose only use is its room.

    Args:
        path: the file.
        size_bytes: of it.
    """

    def __init__(self, path: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self.path, self.size_bytes = path, size_bytes

    def keep(self) -> None:
        """Take the room, if it is not taken yet and the disk has plenty."""
        with contextlib.suppress(OSError):
            if self.path.exists() or shutil.disk_usage(self.path.parent).free < _LEAVES * self.size_bytes:
                return
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                _fill(descriptor, self.size_bytes)
            except OSError:
                self.give_up()
            finally:
                os.close(descriptor)

    def give_up(self) -> bool:
        """Free the room; False if none was kept."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True


def _fill(descriptor: int, size_bytes: int) -> None:
    """Give a file its blocks: a length alone takes no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:  # macOS
        os.write(descriptor, bytes(size_bytes))
