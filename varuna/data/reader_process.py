"""Code of a process that reads samples, and the way of a micro-batch out of it: as plain bytes.

No memory is shared, since a kill could leave it behind.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import stat
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.micro_batch import MicroBatch

LOST = (EOFError, ConnectionResetError, BrokenPipeError)
"""Exceptions that a link raises when its other end is gone."""
_PR_SET_PDEATHSIG = 1


class Read(Protocol):
    """Reads a micro-batch."""

    def __call__(
        self, positions: Sequence[int], keys: tuple[str, ...] | None = None, *, compared: bool = True
    ) -> MicroBatch:
        """Read the samples at ``positions``; see ``SampleSource.micro_batch``."""
        ...


def die_with_parent(parent: int) -> bool:
    """Have this process killed when its parent ends; False: that has happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def serve(read: Read, link: "Connection[Any, Any]", parent: int) -> None:
    """Read what is asked for, until the other end is gone; ``parent`` is the process that forked this one."""
    if not die_with_parent(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    let_go_of_sockets(link.fileno())
    gc.freeze()  # what the parent has is its own to collect
    torch.set_num_threads(1)
    with suppress(*LOST):
        while True:
            positions, keys, compared = link.recv()
            try:
                batch = read(positions, keys, compared=compared)
            except BaseException as error:  # noqa: BLE001 - for the thread that needs it, even SystemExit
                link.send_bytes(ForkingPickler.dumps(_portable(error)))
                continue
            _send(link, batch)
            del batch


def let_go_of_sockets(own: int) -> None:
    """Close the parent's sockets here: links to other ranks and the manager must end when the parent does.

    Their numbers stay taken: an object that still knows one may close it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        number = int(name)
        with suppress(OSError):
            if number != own and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number)


def _portable(error: BaseException) -> BaseException:
    """Return the same exception with the traceback of this process as a note; another one if it cannot be sent."""
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


def receive(link: "Connection[Any, Any]") -> MicroBatch | BaseException:
    """Receive a micro-batch from a reader, or the exception that its reading raised.

    Raises:
        EOFError, ConnectionResetError, BrokenPipeError: it is gone.
    """
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
