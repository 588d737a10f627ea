"""Room on a disk for what must be written though others have filled it."""

import contextlib
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 8 * 2**20
_BLOCK_BYTES = 2**20
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
            try:
                with self.path.open("wb") as file:
                    for _ in range(0, self.size_bytes, _BLOCK_BYTES):
                        file.write(os.urandom(min(_BLOCK_BYTES, self.size_bytes)))  # what compresses takes no room
            except OSError:
                self.give_up()

    def give_up(self) -> bool:
        """Free the room; False if none was kept."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True
