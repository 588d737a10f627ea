"""Logs of workers on other machines, kept here after the machines are gone.

Whatever happens to the files, nobody pays for it but the logs: a slow or full disk, somebody who truncates or removes
them, an agent that skips bytes. What is not here is named where it is missing.
"""

import errno
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

from varuna.fleet.net.protocol import Output
from varuna.fleet.run_folder.log_room import LogRoom
from varuna.process.console import warn

MAX_LOG_BYTES = 256 * 2**20
"""More of a worker's output than this stays on its machine."""
WAITING_BYTES = 16 * 2**20
"""Bytes that may wait for a slow disk; more are left out."""
MOST_LOGS = 20_000
"""Most log files; the output of further workers is not kept."""
_LINGER_S = 5.0
_FULL = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
_FULL_S, _OTHER_S = 60.0, 1.0  # until the disk is tried again


class LogKeeper:
    """Files in one folder, written by a thread of its own; the methods are for one other thread, and return at once.

    Args:
        folder: gets ``<worker>.log``.
        clock: seconds.
        most_bytes: of one log; what a worker writes beyond is not kept.
        waiting_bytes: what may wait for a slow disk; more is left out.
        most_logs: files; the output of further workers is not kept.
        room: for all logs together; None: that of the folder.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_bytes: int = MAX_LOG_BYTES,
        waiting_bytes: int = WAITING_BYTES,
        most_logs: int = MOST_LOGS,
        room: LogRoom | None = None,
    ) -> None:
        self._folder, self._clock = folder, clock
        self._room = room or LogRoom(folder, clock=clock)
        self._most_bytes, self._most_waiting_bytes, self._most_logs = most_bytes, waiting_bytes, most_logs
        self._taken = {path.stem: path.stat().st_size for path in folder.glob("*.log")}  # bytes, by worker
        self._workers: defaultdict[str, list[str]] = defaultdict(list)  # of each node
        for worker in self._taken:
            self._workers[_node_of(worker)].append(worker)
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()  # guards what waits, and whether there is a thread
        self._is_writing = False
        self._left_out: dict[str, int] = {}  # bytes that did not fit into what waits; the next ones name them
        self._failed: dict[str, int] = {}  # bytes that the disk did not take; for the thread that writes
        self._paused_until_s = 0.0
        self._told: set[str] = set()

    def begin_log(self, worker: str) -> None:
        """Begin a worker's log, which is empty if the worker writes nothing."""
        if self._knows(worker):
            self._put(worker, b"")

    def write(self, output: Output) -> None:
        """Append; what is there already is not written twice, and what is missing in between is named."""
        if not self._knows(output.worker):
            return
        taken = self._taken[output.worker]
        fresh = output.data[max(0, taken - output.offset) :]
        if not fresh:
            return
        begin = max(taken, output.offset)
        self._taken[output.worker] = begin + len(fresh)
        if begin < self._most_bytes:
            gap = _missing(output.offset - taken) if output.offset > taken else b""
            self._put(output.worker, gap + fresh[: self._most_bytes - begin])

    def sizes(self, node: str) -> dict[str, int]:
        """Bytes that came from each worker of a node."""
        return {worker: self._taken[worker] for worker in self._workers.get(node, ())}

    def wait_until_written(self, bound_s: float = 10.0) -> bool:
        """Wait until all is written; False if ``bound_s`` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes and not self._waiting, bound_s)

    def _knows(self, worker: str) -> bool:
        if worker not in self._taken and len(self._taken) < self._most_logs:
            self._taken[worker] = 0
            self._workers[_node_of(worker)].append(worker)
        return worker in self._taken

    def _put(self, worker: str, data: bytes) -> None:
        with self._changed:
            if self._waiting_bytes + len(data) > self._most_waiting_bytes:
                self._left_out[worker] = self._left_out.get(worker, 0) + len(data)
                return
            if left_out := self._left_out.pop(worker, 0):
                data = _missing(left_out) + data
            self._waiting.append((worker, data))
            self._waiting_bytes += len(data)
            self._changed.notify_all()
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write_all, name="varuna-logs", daemon=True).start()

    # -- the thread that writes ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, _LINGER_S):
                    self._is_writing = False
                    return
                worker, data = self._waiting[0]
            failed = self._failed.pop(worker, 0)
            if left := self._append(worker, (_missing(failed) if failed else b"") + data):
                self._failed[worker] = failed + min(left, len(data))
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _append(self, worker: str, data: bytes) -> int:
        """Write; returns how many bytes were not, after an error also for a while."""
        if self._clock() < self._paused_until_s:
            return len(data)
        path, rest = self._folder / f"{worker}.log", data
        try:
            if why := self._room.take_room(len(data)):
                raise OSError(errno.ENOSPC, why)
            with open(path, "ab", buffering=0, opener=_open_private) as file:
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            self._paused_until_s = self._clock() + (_FULL_S if error.errno in _FULL else _OTHER_S)
            if (why := str(error.strerror)) not in self._told:
                self._told.add(why)
                warn(f"{path} is missing output: {error.strerror}. The output is on the worker's machine.")
            return len(rest)
        return 0


def _node_of(worker: str) -> str:
    return worker.rpartition(".")[0]


def _open_private(path: str, flags: int) -> int:
    """Logs may show what a script prints: they are for their owner, as keys and tokens are."""
    return os.open(path, flags, 0o600)


def _missing(count: int) -> bytes:
    return f"\n[varuna: {count} bytes are missing here]\n".encode()
