"""Which sockets are a group's own: those that its device watches.

Gloo does not give its sockets away, and shutting them is the only way to free who is blocked on them. Each device of
gloo's has a thread that waits on an epoll instance of its own, and Linux lists what that watches. So the sockets of one
group are told from those of another also where ranks are threads of one process, and from all that is not gloo's.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_making = threading.Lock()
_PROCESS = Path("/proc/self")


class Watched(NamedTuple):
    """A descriptor that an epoll instance watches."""

    number: int
    inode: int


class DeviceEpoll(NamedTuple):
    """The epoll instance of a device."""

    number: int
    pipe: int
    """inode of the pipe that wakes the device's thread: no other instance watches it, whoever gets its number later"""

    def sockets(self) -> list[socket.socket]:
        """Duplicates of the connected sockets that it watches now: shutting them never touches a reused number."""
        watched = _watched(self.number)
        if self.pipe not in {each.inode for each in watched}:
            return []
        return [connection for each in watched if (connection := _connection(each)) is not None]


def with_epoll(make: Callable[[], Any]) -> tuple[Any, DeviceEpoll | None]:
    """Make a device; and its epoll instance, None where it cannot be told (no Linux)."""
    with _making:
        before = _devices()
        made = make()
        new = [DeviceEpoll(number, pipe) for pipe, number in _devices().items() if pipe not in before]
    return made, new[0] if len(new) == 1 else None


def _devices() -> dict[int, int]:
    """Of each epoll instance of this process that watches a pipe: its number, by the pipe's inode."""
    found = {}
    for number, target in _descriptors():
        if target == "anon_inode:[eventpoll]":
            for each in _watched(number):
                if _target(each.number) == f"pipe:[{each.inode}]":
                    found[each.inode] = number
    return found


def _descriptors() -> Iterator[tuple[int, str]]:
    try:
        numbers = os.listdir(_PROCESS / "fd")
    except FileNotFoundError:  # not Linux: threads stay blocked until the groups' time-out
        return
    for number in numbers:
        yield int(number), _target(int(number))


def _target(number: int) -> str:
    """What a descriptor is; empty if it was closed since."""
    try:
        return os.readlink(_PROCESS / "fd" / str(number))
    except OSError:
        return ""


def _watched(epoll: int) -> list[Watched]:
    """Lines such as ``tfd: 6 events: 19 data: 55e5d1c4d120 pos:0 ino:5fb48 sdev:9``."""
    try:
        lines = (_PROCESS / "fdinfo" / str(epoll)).read_text().splitlines()
    except OSError:  # closed since
        return []
    words = [line.split() for line in lines if line.startswith("tfd:")]
    return [
        Watched(int(line[1]), int(word.removeprefix("ino:"), 16))
        for line in words
        for word in line
        if word.startswith("ino:")
    ]


def _connection(watched: Watched) -> socket.socket | None:
    """A duplicate of a socket that has a peer: a listener has none, and a pipe is no socket."""
    try:
        number = os.dup(watched.number)
    except OSError:  # closed since
        return None
    try:
        connection = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    with contextlib.suppress(OSError):
        if os.fstat(number).st_ino == watched.inode:
            connection.getpeername()
            return connection
    connection.close()
    return None
