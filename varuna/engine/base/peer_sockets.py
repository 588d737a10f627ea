"""Which sockets are a group's own: those that its device watches.

Gloo does not give its sockets away, and shutting them is the only way to free who is blocked on them. Each device of
gloo's has a thread that waits on an epoll instance of its own, and Linux lists what that watches. So the sockets of one
group are told from those of another also where ranks are threads of one process, and from all that is not gloo's.
"""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_making = threading.Lock()
_FDS, _INFOS = "/proc/self/fd", "/proc/self/fdinfo"


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
        before = _open()
        made = make()
        now = _open()
    pipes = now.pipes - before.pipes
    # To read what an instance watches takes long where many ranks are threads of a process, so new numbers come first:
    # only where a device has just ended can another one have its number.
    for numbers in (now.epolls - before.epolls, now.epolls):
        new = [(number, each.inode) for number in numbers for each in _watched(number) if each.inode in pipes]
        if len(new) == 1:
            return made, DeviceEpoll(*new[0])
    return made, None


class _Open(NamedTuple):
    """What this process has open."""

    pipes: set[int]
    """by inode"""
    epolls: set[int]
    """by number"""


def _open() -> _Open:
    found = _Open(set(), set())
    try:
        numbers = map(int, os.listdir(_FDS))
    except FileNotFoundError:  # not Linux: threads stay blocked until the groups' time-out
        return found
    for number in numbers:
        try:
            status = os.fstat(number)
        except OSError:  # closed since
            continue
        if stat.S_ISFIFO(status.st_mode):
            found.pipes.add(status.st_ino)
        elif not stat.S_ISSOCK(status.st_mode) and _target(number) == "anon_inode:[eventpoll]":  # most are sockets
            found.epolls.add(number)
    return found


def _target(number: int) -> str:
    """What a descriptor is; empty if it was closed since."""
    try:
        return os.readlink(f"{_FDS}/{number}")
    except OSError:
        return ""


def _watched(epoll: int) -> list[Watched]:
    """Lines such as ``tfd: 6 events: 19 data: 55e5d1c4d120 pos:0 ino:5fb48 sdev:9``."""
    try:
        lines = Path(_INFOS, str(epoll)).read_text().splitlines()
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
