"""Memory that this machine, or this container, has left, and processes that the system killed for want of it."""

import threading
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")
_COUNTERS = Path("/proc/vmstat")


class MemoryKills:
    """Processes that the system has killed because memory was short; each is found at most once.

    The system counts them, and does not say which: it was this one if one more was killed since a process was started,
    and no other process was found to be it.
    """

    def __init__(self, counters: Path = _COUNTERS) -> None:
        self._counters, self._lock, self._known = counters, threading.Lock(), 0
        self.begin()

    def begin(self) -> None:
        """Note that a process starts: those before it were others."""
        with self._lock:
            self._known = self._count()

    def has_one(self) -> bool:
        """Return whether a process that has just died by SIGKILL was one of them."""
        with self._lock:
            if self._count() <= self._known:
                return False
            self._known += 1
            return True

    def _count(self) -> int:
        """Return the number so far; 0 where the system does not say."""
        try:
            rows = dict(line.split() for line in self._counters.read_text().splitlines())
            return int(rows["oom_kill"])
        except (OSError, KeyError, ValueError):
            return 0


def available_bytes() -> int | None:
    """Return the bytes that a new program could use without swapping; None where the system does not say."""
    found = [size for size in (_machine_bytes(), _container_bytes()) if size is not None]
    return min(found, default=None)


def _machine_bytes() -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _container_bytes() -> int | None:
    """Return the bytes left of this container's limit (control groups, version 2); droppable files take none of it."""
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        stat = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, KeyError, ValueError):
        return None
