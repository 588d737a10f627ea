"""Processes that read samples beside the one that trains, as torch's ``DataLoader`` has them.

``DataLoader`` itself asks a sampler for batches that it cannot give back: a morph must drop what it asked for, and
samples are asked for step by step, as far as a bound allows. So these are processes of its kind (forked, so that
datasets and ``collate`` need not be pickled) that are told what to read.

A reader reads one micro-batch at a time and keeps it until it is fetched: this process holds no more than without
readers.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, NoReturn

from varuna.core.errors import DataError, UsageError
from varuna.data.micro_batch import MicroBatch
from varuna.data.randomness import generator_lock
from varuna.data.reader_process import LOST, Read, receive, serve
from varuna.data.slow import SlowReading

_END_S = 2.0
"""For readers to end by themselves."""
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()


class SampleRequest(NamedTuple):
    """A micro-batch to be read."""

    positions: tuple[int, ...]
    keys: tuple[str, ...] | None
    compared: bool = True


class Reader:
    """A process that reads, as the one that trains sees it."""

    def __init__(self, name: str, link: "Connection[Any, Any]", process: ForkProcess) -> None:
        """Take over a process, which has a name for messages, and the other end of a link."""
        self.name, self.link, self._process = name, link, process
        self.reading: list[tuple[int, ...]] = []
        """positions of what was asked for and not fetched; all but the last were dropped since"""

    def submit(self, ask: SampleRequest) -> None:
        """Let it read.

        Raises:
            DataError: it is dead.
        """
        self.reading.append(ask.positions)
        try:
            self.link.send(tuple(ask))
        except LOST as error:
            self._lost(error)

    def fetch(self) -> MicroBatch | BaseException:
        """Wait for what was asked for last; what its reading raised comes in its place.

        Raises:
            DataError: it is dead.
        """
        try:
            while True:
                found = receive(self.link)
                # In the order in which they were asked for: what comes first may be of a request that was dropped.
                self.reading.pop(0)
                if not self.reading:
                    return found
        except LOST as error:
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        """Say how it ended, now that its end of the link is closed, and what to do about it.

        Raises:
            DataError: because of its memory, if the system has killed it as it kills workers for that.
        """
        self._process.join(_END_S)
        code, memory = self._process.exitcode, ""
        how = "closed its connection"
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        at = f" It was reading positions {list(self.reading[-1])} of the run." if self.reading else ""
        if code == -signal.SIGKILL:
            memory, error = " The machine may be out of memory: see dmesg.", MemoryError(f"a reader {how}")
        raise DataError(
            f"{self.name}, which reads samples, {how}.{at}{memory} Run the script with num_workers=0 to see where it "
            "fails, or with fewer of them if memory is short."
        ) from error


class InThread:
    """Reads in the thread that fetches, one micro-batch at a time."""

    count = 1

    def __init__(self, read: Read, watch: SlowReading | None) -> None:
        """Keep how to read, and what says whether processes would help; None: the user has decided."""
        self._read, self._watch = read, watch
        self._asked: SampleRequest | None = None
        self.in_use = threading.Lock()

    @property
    def has_idle(self) -> bool:
        """True if nothing waits to be fetched."""
        return self._asked is None

    def submit(self, ask: SampleRequest) -> None:
        """Have this read by ``fetch``."""
        self._asked = ask

    def fetch(self) -> MicroBatch | BaseException:
        """Read what was asked for.

        Raises:
            BaseException: whatever the dataset or ``collate`` raises.
        """
        assert self._asked is not None
        ask, self._asked = self._asked, None
        begin_s, used_s = time.monotonic(), time.thread_time()
        batch = self._read(ask.positions, ask.keys, compared=ask.compared)
        if self._watch is not None:
            self._watch.took(time.monotonic() - begin_s, time.thread_time() - used_s)
        return batch

    def forget(self) -> None:
        """Drop the request: it is not fetched any more."""
        self._asked = None

    def waited(self, seconds: float) -> None:
        """Note that training has waited for samples."""
        if self._watch is not None:
            self._watch.waited(seconds)


class Readers:
    """Processes that read micro-batches of one dataset, for one loader at a time."""

    def __init__(self, read: Read, count: int) -> None:
        """Fork the processes. They end with the thread that calls this, with this process, or with ``close``.

        Args:
            read: reads a micro-batch.
            count: of processes.

        Raises:
            UsageError: this system cannot fork.
        """
        if not CAN_FORK:
            raise UsageError(f"num_workers= needs processes that are forked, which {sys.platform} has not: leave it 0")
        self.in_use = threading.Lock()
        """held by the loader that uses them"""
        started = [_start(read, f"reader {number + 1} of {count}") for number in range(count)]
        self._readers = [each for each, _ in started]
        self._idle = deque(self._readers)
        self._busy: deque[Reader] = deque()
        self._end = weakref.finalize(self, _end, self._readers, [process for _, process in started])

    @property
    def count(self) -> int:
        """Number of the processes."""
        return len(self._readers)

    @property
    def has_idle(self) -> bool:
        """True if one of them reads nothing."""
        return bool(self._idle)

    def submit(self, ask: SampleRequest) -> None:
        """Let an idle one read.

        Raises:
            DataError: it is dead.
        """
        self._idle[0].submit(ask)
        self._busy.append(self._idle.popleft())

    def fetch(self) -> MicroBatch | BaseException:
        """Wait for the micro-batch that was asked for first, and take it; what its reading raised comes in its place.

        Raises:
            DataError: its reader is dead.
        """
        reader = self._busy.popleft()
        self._idle.append(reader)  # also a dead one: it says so again
        return reader.fetch()

    def forget(self) -> None:
        """Drop the requests: they are not fetched any more."""
        self._idle.extend(self._busy)
        self._busy.clear()

    def waited(self, seconds: float) -> None:
        """Ignore that training has waited for samples: the user chose the number of processes."""

    def close(self) -> None:
        """End the processes, those that do not answer by SIGKILL."""
        self._end()


@contextmanager
def forking() -> Iterator[None]:
    """Keep other threads from drawing random numbers in this block: their lock would stay taken in the child."""
    with generator_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        yield


def _start(read: Read, name: str) -> tuple[Reader, ForkProcess]:
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(read, its, os.getpid()), name=name, daemon=True
    )
    with forking():
        process.start()
    its.close()
    return Reader(f"{name} (process {process.pid})", mine, process), process


def _end(readers: Sequence[Reader], processes: Sequence[ForkProcess]) -> None:
    for reader in readers:
        reader.link.close()
    for process in processes:
        process.join(_END_S if process is processes[0] else 0.1)
        if process.is_alive():
            process.kill()
            process.join(_END_S)
