"""The seam to NCCL, by NVIDIA's own binding, nccl4py.

torch's ``ProcessGroupNCCL`` is not used: it runs on streams of its own, connects when it is first used, and brings a
watchdog per group that ends the process when a peer is gone, which is when a worker must go on. NCCL itself needs four
calls: connect without blocking, queue on a given stream, look for errors, abort.
"""

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from varuna.core.errors import UsageError
from varuna.engine.device.streams import Stream

_SUCCESS, _IN_PROGRESS = 0, 7
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR"""


def load() -> Any:
    """Return the binding, ``nccl.core``; it finds the NCCL that torch brings where it is built with CUDA.

    Raises:
        UsageError: the binding is not installed, or finds no library.
    """
    try:
        from nccl import core

        core.get_version()
    except (ImportError, RuntimeError) as error:  # the latter: no library
        raise UsageError(
            f'links="nccl" needs nccl4py and the NCCL that torch brings ({error}). Install nccl4py where '
            "torch is built with CUDA, or leave links= out to send through host memory."
        ) from None
    return core


class NcclCommunicator:
    """A ``gpu_links.Communicator`` of NCCL."""

    def __init__(self, core: Any, communicator: Any) -> None:
        self._core, self._communicator = core, communicator
        self._lock = threading.Lock()  # NCCL takes one call at a time per communicator; none of them blocks

    def send(self, buffer: Tensor, peer: int, stream: Stream) -> None:
        """See ``gpu_links.Communicator``."""
        with self._called() as communicator:
            communicator.send(buffer, peer, stream=stream.cuda_stream)

    def receive(self, buffer: Tensor, peer: int, stream: Stream) -> None:
        """See ``gpu_links.Communicator``."""
        with self._called() as communicator:
            communicator.recv(buffer, peer, stream=stream.cuda_stream)

    def all_reduce(self, values: Tensor, stream: Stream) -> None:
        """See ``gpu_links.Communicator``."""
        assert values.dtype is torch.float32
        assert values.is_contiguous()
        with self._called() as communicator:
            communicator.allreduce(values, values, self._core.SUM, stream=stream.cuda_stream)

    def ready(self) -> bool:
        """See ``gpu_links.Communicator``."""
        with self._called() as communicator:
            state = int(communicator.get_async_error())
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._core.get_error_string(state)}")
        return state == _SUCCESS

    def abort(self) -> None:
        """See ``gpu_links.Communicator``."""
        with self._lock:
            if self._communicator.is_valid:
                self._communicator.abort()

    @contextmanager
    def _called(self) -> Iterator[Any]:
        with self._lock, _reported():
            if not self._communicator.is_valid:
                raise RuntimeError("the communicator was aborted")
            yield self._communicator


@contextmanager
def _reported() -> Iterator[None]:
    """Raise the binding's errors, which have no base of their own, as ``RuntimeError``."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"NCCL: {error}") from error


class Nccl:
    """A ``gpu_links.GpuTransport`` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Load the binding.

        Raises:
            UsageError: there is none that will do.
        """
        self._device, self._core = device, load()

    def bind(self, interface_host: str) -> None:
        """Set the interface, before the first communicator: NCCL reads it once. The user's own setting stays."""
        if name := interface_with(interface_host):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")

    def new_identity(self) -> bytes:
        """See ``gpu_links.GpuTransport``."""
        with _reported():
            return bytes(self._core.get_unique_id())

    def connect(self, identity: bytes, rank: int, size: int) -> NcclCommunicator:
        """See ``gpu_links.GpuTransport``."""
        core = self._core
        with torch.cuda.device(self._device), _reported():
            communicator = core.Communicator.init(
                size, rank, core.UniqueId.from_bytes(identity), core.NCCLConfig(blocking=False)
            )
        return NcclCommunicator(core, communicator)


def interface_with(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None if none has."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[20:24] == wanted:
                return name
    return None
