"""Limits on what processes of this machine may use: its memory and cores, its container's limits, and the shell's."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from varuna.extras.doctor.judging.facts import LimitFacts

_ENDLESS_BYTES = 1 << 60
"""Version 1 of control groups writes a number of this size where there is no limit."""


def look_at_limits(root: Path = Path("/")) -> LimitFacts:
    """Read the limits of this process's machine; ``root`` is where its file systems are."""
    memory = _meminfo(root / "proc" / "meminfo")
    container_bytes, used_bytes = _container_memory(root)
    available = memory.get("MemAvailable")
    if container_bytes is not None and used_bytes is not None:
        left = max(0, container_bytes - used_bytes)
        available = left if available is None else min(available, left)
    shared = root / "dev" / "shm"
    return LimitFacts(
        cpus=_cpus(),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=available,
        container_cpus=_container_cpus(root),
        container_bytes=container_bytes,
        container_processes=_least(root, "pids", "pids.max"),
        shared_bytes=shutil.disk_usage(shared).total if shared.is_dir() else None,
        open_files=_hard(resource.RLIMIT_NOFILE),
        processes=_hard(resource.RLIMIT_NPROC),
        pinned_bytes=_hard(resource.RLIMIT_MEMLOCK),
    )


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hard(kind: int) -> int | None:
    """Return the hard limit: Varuna raises the soft one itself, up to this."""
    _, hard = resource.getrlimit(kind)
    return None if hard == resource.RLIM_INFINITY else hard


def _meminfo(path: Path) -> dict[str, int]:
    """Return the numbers of a meminfo file by name, in bytes."""
    try:
        rows = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return {name: int(value.split()[0]) * 1024 for name, value in rows if value.split()}
    except (OSError, ValueError):
        return {}


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """List folders of this process's control groups, from its own to the topmost, in both versions."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys" / "fs" / "cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")
        yield own
        for parent in own.parents:
            if parent == top.parent:
                break
            yield parent


def _numbers(root: Path, controller: str, *names: str) -> Iterator[tuple[Path, list[int]]]:
    for folder in _groups(root, controller):
        for name in names:
            try:
                words = (folder / name).read_text().split()
                yield folder, [int(word) for word in words]
            except (OSError, ValueError):  # not there, or the word "max"
                continue


def _least(root: Path, controller: str, *names: str) -> int | None:
    return min((found[0] for _, found in _numbers(root, controller, *names) if found), default=None)


def _container_memory(root: Path) -> tuple[int | None, int | None]:
    """Return the smallest limit, and what is in use of it, without the files that could be dropped."""
    found = [
        (numbers[0], folder)
        for folder, numbers in _numbers(root, "memory", "memory.max", "memory.limit_in_bytes")
        if numbers and numbers[0] < _ENDLESS_BYTES
    ]
    if not found:
        return None, None
    limit, folder = min(found)
    try:
        name = next(n for n in ("memory.current", "memory.usage_in_bytes") if (folder / n).exists())
        used = int((folder / name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    except (OSError, ValueError, StopIteration):
        return limit, None
    return limit, max(0, used)


def _container_cpus(root: Path) -> float | None:
    shares = [quota[0] / quota[1] for _, quota in _numbers(root, "cpu", "cpu.max") if len(quota) == 2 and quota[1] > 0]
    for folder, quota in _numbers(root, "cpu", "cpu.cfs_quota_us"):
        try:
            period = int((folder / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota and quota[0] > 0 and period > 0:
            shares.append(quota[0] / period)
    return min(shares, default=None)
