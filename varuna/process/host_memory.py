"""How much memory this machine, or this container, has left."""

from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that a new program could use without swapping; None where nobody says."""
    found = [size for size in (_machine_bytes(), _container_bytes()) if size is not None]
    return min(found, default=None)


def _machine_bytes() -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _container_bytes() -> int | None:
    """What is left of this container's own limit (version 2 of control groups), without files that could be dropped."""
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        stat = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, KeyError, ValueError):
        return None
