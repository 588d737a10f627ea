"""A process that is forked early, before there is state or an open file, and forks readers when they are wanted.

A reader that was forked in the middle of training would keep copies of the parameters as they were, share the place in
every file that has been opened since, and inherit the locks of all threads. This one waits, and has none.
"""

import multiprocessing
import os
import signal
import socket
import stat
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from varuna.core.errors import DataError
from varuna.data.reader_process import Read, die_with_parent, let_go_of_sockets, serve
from varuna.data.readers import Reader, forking

_ANSWER_S = 20.0
_NUMBER_BYTES = 8


class Spare:
    """The process, as its parent sees it."""

    def __init__(self, read: Read) -> None:
        """Fork it. It ends with the thread that calls this, with this process, or with ``close``.

        Args:
            read: reads a micro-batch, in processes that it will fork.
        """
        self._control, its = socket.socketpair()
        self._control.settimeout(_ANSWER_S)
        self._places, self._started = _places(), 0
        self._process = multiprocessing.get_context("fork").Process(
            target=_wait, args=(read, its, self._control, os.getpid()), name="spare reader", daemon=True
        )
        with forking():
            self._process.start()
        its.close()
        self._end = weakref.finalize(self, _end, self._control, self._process)

    @property
    def moved(self) -> str | None:
        """A file that was open already, and has been read since: a forked reader would share the place in it."""
        now = _places()
        for number, (file, place, name) in self._places.items():
            if number in now and now[number][0] == file and now[number][1] != place:
                return name
        return None

    def reader(self) -> Reader:
        """Have a reader forked.

        Raises:
            DataError: the process is gone.
        """
        mine, its = multiprocessing.Pipe()
        try:
            with its:
                socket.send_fds(self._control, [b"fork"], [its.fileno()])
                pid = int.from_bytes(self._control.recv(_NUMBER_BYTES), "little")
        except OSError:
            pid = 0
        if not pid:
            mine.close()
            raise DataError("the process that would fork readers is gone")
        self._started += 1
        return Reader(f"reader {self._started} (process {pid})", mine, lambda: "ended")

    def close(self) -> None:
        """End it, and all readers that it has forked."""
        self._end()


def _end(control: socket.socket, process: ForkProcess) -> None:
    control.close()
    process.kill()
    process.join(_ANSWER_S)


def _places() -> dict[int, tuple[tuple[int, int], int, str]]:
    """Of every regular file that is open for reading: which one, the place in it, its name."""
    found = dict[int, tuple[tuple[int, int], int, str]]()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError, ValueError, KeyError):
            status = os.fstat(number)
            text = Path(f"/proc/self/fdinfo/{number}").read_text()
            lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            writes_only = int(lines["flags"], 8) & os.O_ACCMODE == os.O_WRONLY
            if number > 2 and stat.S_ISREG(status.st_mode) and not writes_only:
                name = os.readlink(f"/proc/self/fd/{number}")
                found[number] = (status.st_dev, status.st_ino), int(lines["pos"]), name
    return found


# -- in the child ----------------------------------------------------------------------------------------------


def _wait(read: Read, control: socket.socket, others: socket.socket, parent: int) -> None:
    """Fork a reader for each link that comes, until the parent is gone."""
    if not die_with_parent(parent):
        return
    others.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # readers that end leave nothing
    let_go_of_sockets(control.fileno())
    control.settimeout(None)
    mine = os.getpid()
    while True:
        message, handles, _, _ = socket.recv_fds(control, 16, 1)
        if not message or not handles:
            return
        pid = os.fork()
        if pid == 0:
            _read(read, handles[0], mine)
        os.close(handles[0])
        control.sendall(pid.to_bytes(_NUMBER_BYTES, "little"))


def _read(read: Read, handle: int, parent: int) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        multiprocessing.current_process().name = "reader"
        link: Connection[Any, Any] = Connection(handle)
        serve(read, link, parent)
        status = 0
    finally:
        os._exit(status)
