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
from collections.abc import Callable, Iterator, Mapping
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


_made: dict[int, Watched] = {}
"""By number of a device's epoll instance: its pipe. While that is open, nobody reads again what the instance watches:
where many ranks are threads of a process, this takes longer than all else about a group."""


def with_epoll(make: Callable[[], Any]) -> tuple[Any, DeviceEpoll | None]:
    """Make a device; and its epoll instance, None where it cannot be told (no Linux)."""
    with _making:
        before = _devices(_made)
        made = make()
        after = _devices(_made)
        if len(after.keys() - before.keys()) != 1:  # the number may be that of a device that has yet to close its pipe
            after = _devices({})
        new = after.keys() - before.keys()
        if len(new) != 1:
            return made, None
        [pipe] = new
        _made[after[pipe]] = pipe
        return made, DeviceEpoll(after[pipe], pipe.inode)


def _devices(known: Mapping[int, Watched]) -> dict[Watched, int]:
    """Of each epoll instance of this process that watches a pipe: its number, by that pipe."""
    found = {}
    for number in _epolls():
        pipe = known.get(number)
        pipes = [pipe] if pipe is not None and _is_open(pipe) else filter(_is_open, _watched(number))
        found.update(dict.fromkeys(pipes, number))
    return found


def _epolls() -> Iterator[int]:
    """Numbers of this process' epoll instances."""
    try:
        numbers = map(int, os.listdir(_FDS))
    except FileNotFoundError:  # not Linux: threads stay blocked until the groups' time-out
        return
    for number in numbers:
        try:
            mode = os.fstat(number).st_mode
        except OSError:  # closed since
            continue
        # most are sockets and pipes, and to ask for a name takes longer
        if not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)) and _target(number) == "anon_inode:[eventpoll]":
            yield number


def _is_open(pipe: Watched) -> bool:
    """Whether this is a pipe, and open."""
    return _target(pipe.number) == f"pipe:[{pipe.inode}]"


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
