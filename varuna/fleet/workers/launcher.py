"""Worker processes of this machine: started, watched, heard, and ended for certain."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO

from varuna.fleet.net.join_string import JOIN_VARIABLE
from varuna.fleet.run_folder.log_room import LogRoom
from varuna.fleet.state.inputs import WorkerExited
from varuna.process.console import NOTE, say, warn
from varuna.process.host_memory import MemoryKills
from varuna.process.tethering import tether
from varuna.process.worker_environment import DEFAULTS

LINE_BYTES = 8 * 2**10
"""Bytes of the longest line that stays whole; longer ones come in pieces."""
TAIL_BYTES = 64 * 2**10
_TAIL_LINES = 200
_NOTE = f"varuna: {NOTE}".encode()
_END = re.compile(rb"\r\n|\n|\r")


class Lines:
    """Cuts a stream after each line feed, carriage return, or both; holds at most one unfinished line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that are complete now, ends included, and pieces of one that is too long."""
        data = self._rest + data
        found: list[bytes] = []
        begin = 0
        for match in _END.finditer(
            data, 0, len(data) - data.endswith(b"\r")
        ):  # what follows may be the \n of a last \r
            found.extend(_pieces(data[begin : match.end()]))
            begin = match.end()
        rest = data[begin:]
        while len(rest) > LINE_BYTES:
            found.append(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        self._rest = rest
        return found

    def unfinished_line(self) -> bytes:
        """Return the last line if it has no end yet."""
        rest, self._rest = self._rest, b""
        return rest


class Tail:
    """The newest lines, within bounds."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line; the oldest ones go."""
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > _TAIL_LINES or self._bytes > TAIL_BYTES:
            self._bytes -= len(self._lines.popleft())

    def text(self) -> str:
        """Return the lines as one text."""
        return b"".join(self._lines).decode(errors="replace")


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + LINE_BYTES] for start in range(0, len(line), LINE_BYTES)]


_READ_BYTES = 64 * 2**10
_PIPE_BYTES = 2**20
LOG_BYTES = 256 * 2**20
"""More of one worker's output than this is not kept: a machine's disk is shared with what it trains."""
KILL_S = 10.0  # for the dead to be reaped and their output to be read; in the kernel's hands one may never end
DRAIN_S = 2.0  # for the last output of a dead worker; a grandchild may keep its pipe open


class _Process:
    """One worker's process, with the threads that read and await it."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], place: int) -> None:
        self.name = name
        self.place = place
        self.popen = popen
        self.stderr_tail = Tail()
        self.readers: list[threading.Thread] = []
        self.waiter: threading.Thread | None = None
        self.lock = threading.Lock()  # the process group's number is ours only until the process is reaped
        self.reaped = False
        self.was_killed = False
        """by this process: not by its system"""

    def kill(self) -> None:
        """SIGKILL to the whole process group, so that data loaders and the like go too."""
        with self.lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self.reaped:
                os.killpg(self.popen.pid, signal.SIGKILL)


class Launcher:
    """Starts ``python SCRIPT ARGS`` per worker; unless told otherwise, names are w0, w1, ... and never used twice.

    Every worker's output goes to ``<run_dir>/<worker>.log``. Of standard output, only the complete lines of the
    main worker are passed on, as ``write`` gets them; what workers say before there is a main one is kept until then.
    So are its notes to the script's user, which this process says.

    ``spawn`` must be called by a thread that outlives the workers: Linux sends the parent-death signal, which ties
    workers to us, when the *thread* that started them ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        run_dir: Path,
        on_exit: Callable[[WorkerExited], None],
        write: Callable[[bytes], None],
        log_bytes: int = LOG_BYTES,
        room: LogRoom | None = None,
        kill_s: float = KILL_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._room = room or LogRoom(run_dir)
        self._log_bytes, self._kill_s, self._drain_s = log_bytes, kill_s, drain_s
        self._command = [sys.executable, *command]
        inherited = {name: value for name, value in os.environ.items() if name != JOIN_VARIABLE}
        self._environment = {**DEFAULTS, **inherited, **environment}
        self._run_dir = run_dir
        self._on_exit = on_exit
        self._write = write
        self._processes: dict[str, _Process] = {}
        self._lock = threading.Lock()  # guards the fields below
        self._started: set[str] = set()
        self._names = 0
        self._main: str | None = None
        self._early: dict[str, deque[bytes]] = {}
        self._memory_kills = MemoryKills()

    def spawn(
        self, name: str = "", environment: Mapping[str, str] | None = None, *, avoided: Collection[str] = ()
    ) -> str:
        """Start one worker, with more variables if given; returns its name.

        ``LOCAL_RANK``, by which it chooses its GPU, is the lowest number that no living worker has, nor any of those
        whose places are to be ``avoided``.

        Raises:
            OSError: its log or its process cannot be made; nothing was started.
        """
        self._memory_kills.begin()
        with self._lock:
            name = name or f"w{self._names}"
            self._names += 1
            self._started.add(name)  # before its process is there, which may be the faster one
            self._early[name] = deque(maxlen=1000)
            taken = {
                process.place for process in self._processes.values() if not process.reaped or process.name in avoided
            }
        place = min(set(range(len(taken) + 1)) - taken)
        more = {"LOCAL_RANK": str(place), **(environment or {}), "VARUNA_WORKER": name}
        log = _Log(
            self._run_dir / f"{name}.log", self._log_bytes, self._room
        )  # first: a process without a log would have nobody who awaits it
        try:
            popen = subprocess.Popen(
                [*tether(), *self._command],
                env={**self._environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            log.close()
            raise
        process = _Process(name, popen, place)
        assert popen.stdout is not None
        assert popen.stderr is not None
        _widen(popen.stdout)
        _widen(popen.stderr)
        process.readers = [
            _start(f"{name}-stdout", self._read, popen.stdout, log, lambda line: self._stream(name, line)),
            _start(f"{name}-stderr", self._read, popen.stderr, log, lambda line: self._take_error(process, line)),
        ]
        with self._lock:
            self._processes[name] = process
        process.waiter = _start(f"{name}-waiter", self._await, process, log)
        return name

    def kill(self, name: str, *, rests: bool = False) -> None:
        """SIGKILL to the worker's process group; nothing happens if it is gone. Safe from any thread."""
        with self._lock:
            process = self._processes.get(name)
        if process is not None:
            process.was_killed = True
            process.kill()

    def has_started(self, name: str) -> bool:
        """Whether a worker of this name was ever started, or is about to be."""
        with self._lock:
            return name in self._started

    def pid(self, name: str) -> int | None:
        """Process id of a worker that was ever started."""
        with self._lock:
            return self._processes[name].popen.pid if name in self._processes else None

    def set_main(self, name: str) -> None:
        """Pass on the lines of ``name`` from now on; of nobody, if it is not a worker of this launcher."""
        with self._lock:
            first = self._main is None
            self._main = name
            lines = self._early.pop(name, deque()) if first else deque()
            self._early.clear()
        for line in lines:
            self._show(line)

    def stop_all(self, grace_s: float) -> str:
        """Wait ``grace_s`` for all workers to end, then kill the rest, and see that no process is left.

        Returns a complaint that names those that do not end within 10 s of SIGKILL; empty if there are none.
        """
        with self._lock:
            processes = list(self._processes.values())
        deadline_s = time.monotonic() + grace_s
        try:
            for process in processes:
                if process.waiter is not None:
                    process.waiter.join(max(0.0, deadline_s - time.monotonic()))
        finally:  # also when the user is impatient: a second Ctrl-C ends the grace
            for process in processes:
                process.kill()
            deadline_s = time.monotonic() + self._kill_s
            for process in processes:
                if process.waiter is not None:
                    process.waiter.join(max(0.0, deadline_s - time.monotonic()))
            self._show_first()
        left = [f"{p.name} (process {p.popen.pid})" for p in processes if p.waiter is not None and p.waiter.is_alive()]
        if not left:
            return ""
        return (
            f"{', '.join(left)} did not end within {self._kill_s:.0f} s of SIGKILL. They are stuck in the kernel, for "
            "instance because of a failing GPU or network drive. See `ps -o pid,stat,wchan`; only a reboot ends a "
            "process that stays in state D."
        )

    def _show_first(self) -> None:
        """No worker became the main one: show what the first one said, such as a script's ``--help``."""
        with self._lock:
            lines = next(iter(self._early.values()), deque()) if self._main is None else deque()
            self._early.clear()
        for line in lines:
            self._show(line)

    # -- threads of a worker ---------------------------------------------------------------------------------

    def _read(self, pipe: IO[bytes], log: "_Log", take: Callable[[bytes], None]) -> None:
        """Pass on complete lines; half a line at the end goes to the log only."""
        assert isinstance(pipe, BufferedReader)
        lines = Lines()
        with pipe:
            while data := pipe.read1(_READ_BYTES):
                log.write(data)
                for line in lines.feed(data):
                    take(line)

    def _take_error(self, process: _Process, line: bytes) -> None:
        process.stderr_tail.add(line)
        if line.startswith(_NOTE):
            self._stream(process.name, line)

    def _show(self, line: bytes) -> None:
        if line.startswith(_NOTE):
            say(line.decode(errors="replace").strip().removeprefix("varuna: "))
        else:
            self._write(line)

    def _stream(self, name: str, line: bytes) -> None:
        with self._lock:
            if self._main is None and name in self._early:  # not once the run is over: a grandchild may go on
                self._early[name].append(line)
            is_main = self._main == name
        if is_main:
            self._show(line)

    def _await(self, process: _Process, log: "_Log") -> None:
        """Report the exit at once, after its last output was read; no child of it survives."""
        os.waitid(os.P_PID, process.popen.pid, os.WEXITED | os.WNOWAIT)  # dead, but its number is still taken
        process.kill()
        with process.lock:
            code = process.popen.wait()
            process.reaped = True
        for reader in process.readers:
            reader.join(self._drain_s)
        log.close()
        is_oom = code == -signal.SIGKILL and not process.was_killed and self._memory_kills.has_one()
        self._on_exit(WorkerExited(process.name, code, process.stderr_tail.text(), is_oom))


class _Log:
    """A worker's log file, written by two threads.

    What a full disk does not take, or a bound, is lost, and said once: whoever read no further would stop the worker
    at its next line.
    """

    def __init__(self, path: Path, most_bytes: int, room: LogRoom) -> None:
        self._path, self._most_bytes, self._room, self._lock = path, most_bytes, room, threading.Lock()
        # Appending, so that a log which somebody truncates, as logrotate does, has no hole after that.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        self._complained = False
        self._written_bytes = 0

    def write(self, data: bytes) -> None:
        """Append at once, so that a person can follow it."""
        with self._lock:
            if self._file.closed:
                return
            room_bytes = self._most_bytes - self._written_bytes
            if len(data) > room_bytes:
                self._complain(f"it has reached {self._most_bytes // 2**20} MiB")
                data = data[:room_bytes]
            try:
                if why := self._room.take_room(len(data)):
                    self._complain(why)
                    return
                self._written_bytes += self._file.write(data)
            except OSError as error:
                self._complain(error.strerror)

    def _complain(self, why: str | None) -> None:
        if not self._complained:
            warn(f"{self._path} is missing output: {why}. The worker continues.")
        self._complained = True

    def close(self) -> None:
        """Later output, by grandchildren, is dropped."""
        with self._lock:
            self._file.close()


def _widen(pipe: IO[bytes]) -> None:
    """Room for what a worker says while we are stopped: with Linux's 64 KiB it would soon wait for us."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # this user's pipes have had all their room
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _start(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """A daemon thread that runs already."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread
