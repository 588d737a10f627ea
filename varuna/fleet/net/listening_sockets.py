"""Sockets that listen, and their processes, by Linux's ``/proc``: of this machine and this network namespace."""

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_TABLES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))


@dataclass(frozen=True)
class Listening:
    """A TCP socket that accepts connections, and who has it."""

    pid: int
    address: str
    port: int


def available(proc: Path = Path("/proc")) -> bool:
    """Return whether this system tells."""
    return (proc / "net" / "tcp").exists()


def listening(pids: set[int], proc: Path = Path("/proc")) -> tuple[Listening, ...]:
    """Sockets of these processes; those of processes that cannot be read are left out."""
    where = dict(_sockets(proc))
    found = {Listening(pid, *where[inode]) for pid in pids for inode in _inodes(proc, pid) if inode in where}
    return tuple(sorted(found, key=lambda each: (each.pid, each.port, each.address)))


def owner_of(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on ``port``; None if it is on another machine or belongs to somebody else."""
    inodes = {inode for inode, (_, found) in _sockets(proc) if found == port}
    for entry in proc.iterdir():
        if entry.name.isdigit() and inodes.intersection(_inodes(proc, int(entry.name))):
            return int(entry.name)
    return None


def family_of(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """A process and all that it has started, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, stack = set(), [pid]
    while stack:
        current = stack.pop()
        found.add(current)
        stack.extend(parents.get(current, ()))
    return found


def _sockets(proc: Path) -> Iterator[tuple[str, tuple[str, int]]]:
    """Inode, and (address, port), of all sockets that listen."""
    for table, family in _TABLES:
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                yield fields[9], (_address(address, family), int(port, 16))


def _address(words: str, family: socket.AddressFamily) -> str:
    """The kernel prints 32-bit words in the machine's own byte order."""
    numbers = [int(words[start : start + 8], 16) for start in range(0, len(words), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers))


def _inodes(proc: Path, pid: int) -> Iterator[str]:
    try:
        entries = list((proc / str(pid) / "fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]
