"""Bounds on the part of a disk that logs may take: they share it with what a run cannot do without."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from varuna.core.units import format_bytes

MOST_BYTES = 2**30
"""All logs of a folder together."""
LEFT_BYTES = 256 * 2**20
LEFT_SHARE = 0.1
"""Of the disk. Logs leave this share free, or the bytes above where those are less."""
_LOOK_S = 60.0


class Usage(NamedTuple):
    """Bytes of a disk."""

    total: int
    used: int
    free: int


class LogRoom:
    """Says whether logs in a folder may grow; any thread may ask.

    Args:
        folder: has ``*.log``; whoever removes or truncates some makes room for others.
        most_bytes: of all together.
        usage: of the folder's disk.
        clock: seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int = MOST_BYTES,
        usage: Callable[[Path], Usage] = lambda folder: Usage(*shutil.disk_usage(folder)),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._most_bytes, self._usage, self._clock = folder, most_bytes, usage, clock
        self._lock = threading.Lock()  # guards what follows
        self._taken_bytes = self._found()
        self._looked_s = clock()

    def take_room(self, size_bytes: int) -> str:
        """Take room for what is about to be written; why there is none, and nothing if there is.

        Raises:
            OSError: the disk does not say.
        """
        usage = self._usage(self._folder)
        left_bytes = min(LEFT_BYTES, int(LEFT_SHARE * usage.total))
        if usage.free - size_bytes < left_bytes:
            return f"less than {format_bytes(left_bytes)} of its disk is free, and that is not for logs"
        with self._lock:
            if self._taken_bytes + size_bytes > self._most_bytes and self._clock() >= self._looked_s + _LOOK_S:
                self._taken_bytes, self._looked_s = self._found(), self._clock()
            if self._taken_bytes + size_bytes > self._most_bytes:
                return f"all logs in {self._folder} together have {format_bytes(self._most_bytes)}"
            self._taken_bytes += size_bytes
            return ""

    def _found(self) -> int:
        """Bytes of the logs that are there."""
        found = 0
        for path in self._folder.glob("*.log"):
            try:
                found += path.stat().st_size
            except OSError:
                continue  # just removed
        return found
