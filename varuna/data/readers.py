"""Processes that read samples beside the one that trains, as torch's ``DataLoader`` has them.

``DataLoader`` itself asks a sampler for batches that it cannot give back: a morph must drop what it asked for, and
samples are asked for step by step, as far as a bound allows. So these are processes of its kind (forked, so that
datasets and ``collate`` need not be pickled) that are told what to read.

A reader reads one micro-batch at a time and keeps it until it is fetched: this process holds no more than without
readers. Tensors cross as plain bytes, without shared memory that a kill could leave behind.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import stat
import sys
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna.core.errors import DataError, UsageError
from varuna.data.micro_batch import MicroBatch
from varuna.data.randomness import generator_lock

_PR_SET_PDEATHSIG = 1
_END_S = 2.0
"""For readers to end by themselves."""
_LOST = (EOFError, ConnectionResetError, BrokenPipeError)


class Read(Protocol):
    """Reads a micro-batch."""

    def __call__(
        self, positions: Sequence[int], keys: tuple[str, ...] | None = None, *, compared: bool = True
    ) -> MicroBatch:
        """Read the samples at ``positions``; see ``SampleSource.micro_batch``."""
        ...


class _Reader:
    """One process, as its parent sees it."""

    def __init__(self, name: str, process: ForkProcess, link: "Connection[Any, Any]") -> None:
        self.name, self.process, self.link = name, process, link
        self.reading: list[tuple[int, ...]] = []
        """positions of what was asked for and not fetched; all but the last are of nobody's interest any more"""

    def ask(self, positions: Sequence[int], keys: tuple[str, ...] | None, compared: bool) -> None:
        """Let it read."""
        self.reading.append(tuple(positions))
        try:
            self.link.send((tuple(positions), keys, compared))
        except _LOST as error:
            raise self._dead() from error

    def fetch(self) -> MicroBatch | BaseException:
        """Wait for what was asked for last."""
        try:
            while True:
                found = _receive(self.link)
                self.reading.pop(0)
                if not self.reading:
                    return found
        except _LOST as error:
            raise self._dead() from error

    def _dead(self) -> DataError:
        self.process.join(_END_S)
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        memory = " The machine may be out of memory: see dmesg." if code == -signal.SIGKILL else ""
        at = f" It was reading positions {list(self.reading[-1])} of the run." if self.reading else ""
        return DataError(
            f"{self.name} (process {self.process.pid}), which reads samples, {how}.{at}{memory} Run the script with "
            "num_workers=0 to see where it fails, or with fewer of them if memory is short."
        )


class InThread:
    """Reads in the thread that fetches, one micro-batch at a time."""

    count = 1

    def __init__(self, read: Read) -> None:
        self._read = read
        self._asked: tuple[Sequence[int], tuple[str, ...] | None, bool] | None = None
        self.in_use = threading.Lock()

    @property
    def has_idle(self) -> bool:
        """Nothing waits to be fetched."""
        return self._asked is None

    def ask(self, positions: Sequence[int], keys: tuple[str, ...] | None, compared: bool = True) -> None:
        """Have this read by ``fetch``."""
        self._asked = positions, keys, compared

    def fetch(self) -> MicroBatch:
        """Read what was asked for.

        Raises:
            BaseException: whatever the dataset or ``collate`` raises.
        """
        assert self._asked is not None
        (positions, keys, compared), self._asked = self._asked, None
        return self._read(positions, keys, compared=compared)

    def forget(self) -> None:
        """What was asked for is not fetched any more."""
        self._asked = None


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
        if "fork" not in multiprocessing.get_all_start_methods():
            raise UsageError(f"num_workers= needs processes that are forked, which {sys.platform} has not: leave it 0")
        self.in_use = threading.Lock()
        """held by the loader that uses them"""
        self._readers = [_start(read, f"reader {number + 1} of {count}") for number in range(count)]
        self._idle = deque(self._readers)
        self._busy: deque[_Reader] = deque()
        self._end = weakref.finalize(self, _end, self._readers)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._readers)

    @property
    def has_idle(self) -> bool:
        """One of them reads nothing."""
        return bool(self._idle)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [each.process.pid or 0 for each in self._readers]

    def ask(self, positions: Sequence[int], keys: tuple[str, ...] | None, compared: bool = True) -> None:
        """Let an idle one read.

        Raises:
            DataError: it is dead.
        """
        self._idle[0].ask(positions, keys, compared)
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
        """What was asked for is not fetched any more."""
        self._idle.extend(self._busy)
        self._busy.clear()

    def close(self) -> None:
        """End the processes, those that do not answer by SIGKILL."""
        self._end()


def _start(read: Read, name: str) -> _Reader:
    """Fork one process.

    No other thread draws random numbers at that moment, or the lock that says so would stay taken in the child.
    """
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(read, its, os.getpid()), name=name, daemon=True
    )
    with generator_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        process.start()
    its.close()
    return _Reader(name, process, mine)


def _end(readers: Sequence[_Reader]) -> None:
    for reader in readers:
        reader.link.close()
    for reader in readers:
        reader.process.join(_END_S if reader is readers[0] else 0.1)
        if reader.process.is_alive():
            reader.process.kill()
            reader.process.join(_END_S)


# -- in the child ----------------------------------------------------------------------------------------------


def _serve(read: Read, link: "Connection[Any, Any]", parent: int) -> None:
    """Read what the parent asks for, until it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go_of_sockets(link.fileno())
    gc.freeze()  # what the parent has is its own to collect
    torch.set_num_threads(1)
    with suppress(*_LOST):
        while True:
            positions, keys, compared = link.recv()
            try:
                batch = read(positions, keys, compared=compared)
            except BaseException as error:  # noqa: BLE001 - for the thread that needs it, even SystemExit
                link.send_bytes(ForkingPickler.dumps(_portable(error)))
                continue
            _send(link, batch)
            del batch


def _let_go_of_sockets(own: int) -> None:
    """Sockets of the parent (links to other ranks, the manager) must close when it dies, whoever else lives.

    Their numbers stay taken: an object that still knows one may close it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        number = int(name)
        with suppress(OSError):
            if number != own and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number)


def _portable(error: BaseException) -> BaseException:
    """The same exception with the traceback of this process as a note; another one if it cannot be sent."""
    name = multiprocessing.current_process().name
    error.add_note(f"in {name} (process {os.getpid()}):\n{''.join(traceback.format_exception(error)).rstrip()}")
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        sent = DataError(f"reading samples failed: {type(error).__name__}: {error}")
        for note in error.__notes__:
            sent.add_note(note)
        return sent
    return error


def _send(link: "Connection[Any, Any]", batch: MicroBatch) -> None:
    tensors = {
        key: value.detach().cpu().resolve_conj().resolve_neg().contiguous() for key, value in batch.tensors.items()
    }
    layout = [(key, value.dtype, tuple(value.shape)) for key, value in tensors.items()]
    link.send((batch.indices, batch.digests, layout))
    for value in tensors.values():
        view = _bytes_of(value)
        while view:
            view = view[os.write(link.fileno(), view) :]


def _receive(link: "Connection[Any, Any]") -> MicroBatch | BaseException:
    found = link.recv()
    if isinstance(found, BaseException):
        return found
    indices, digests, layout = found
    tensors: dict[str, Tensor] = {}
    for key, dtype, shape in layout:
        tensors[key] = torch.empty(shape, dtype=dtype)
        view = _bytes_of(tensors[key])
        while view:
            count = os.readv(link.fileno(), [view])
            if not count:
                raise EOFError
            view = view[count:]
    return MicroBatch(tensors=tensors, digests=digests, indices=indices)


def _bytes_of(value: Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data
