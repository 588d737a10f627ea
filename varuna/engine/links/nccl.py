"""The seam to NCCL: its C functions, called as they are.

torch's ``ProcessGroupNCCL`` is not used: it runs on streams of its own, connects when it is first used, and brings a
watchdog per group that ends the process when a peer is gone, which is when a worker must go on. NCCL itself needs four
calls: connect without blocking, queue on a given stream, look for errors, abort.
"""

import ctypes
import fcntl
import os
import socket
import struct
import threading
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch
from torch import Tensor

from varuna.core.errors import UsageError
from varuna.engine.device.streams import Stream

_SUCCESS, _IN_PROGRESS = 0, 7
_BYTES, _FLOATS, _SUM = 0, 7, 0
_IDENTITY_BYTES = 128
_OLDEST = 21400
"""2.14, the first that connects without blocking."""
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR"""


class _Identity(ctypes.Structure):
    _fields_ = [("internal", c_char * _IDENTITY_BYTES)]


class _Config(ctypes.Structure):
    """The fields of version 2.14; newer libraries take what follows from their defaults."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(_Identity)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _Identity, c_int, POINTER(_Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommAbort": [c_void_p],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
}


def load(name: str = "libnccl.so.2") -> Any:
    """The library, which torch has loaded for itself where it is built with CUDA.

    Raises:
        UsageError: there is none, or it is too old.
    """
    advice = 'Leave links= out to send through host memory. (links="nccl" uses the NCCL that torch brings.)'
    try:
        library: Any = ctypes.CDLL(name)
    except OSError as error:
        raise UsageError(f'links="nccl" needs {name}, which cannot be loaded ({error}). {advice}') from None
    for function, arguments in _FUNCTIONS.items():
        if hasattr(library, function):
            getattr(library, function).argtypes = arguments
    for function, arguments in (("ncclGetErrorString", [c_int]), ("ncclGetLastError", [c_void_p])):
        getattr(library, function).argtypes, getattr(library, function).restype = arguments, c_char_p
    version = c_int()
    _check(library, library.ncclGetVersion(version))
    if version.value < _OLDEST:
        raise UsageError(f'links="nccl" needs NCCL 2.14 or newer, but found {version.value}. {advice}')
    return library


def _check(library: Any, result: int) -> bool:
    """Whether it is done; not yet, else."""
    if result not in (_SUCCESS, _IN_PROGRESS):
        what, detail = library.ncclGetErrorString(result), library.ncclGetLastError(None)
        raise RuntimeError(f"NCCL: {what.decode()}; {(detail or b'').decode(errors='replace')}")
    return result == _SUCCESS


class NcclCommunicator:
    """A ``gpu_links.Communicator`` of NCCL."""

    def __init__(self, library: Any, handle: c_void_p) -> None:
        self._library, self._handle = library, handle
        self._lock = threading.Lock()  # NCCL takes one call at a time per communicator; none of them blocks

    def send(self, buffer: Tensor, peer: int, stream: Stream) -> None:
        """See ``gpu_links.Communicator``."""
        self._call(self._library.ncclSend, buffer.data_ptr(), buffer.nbytes, _BYTES, peer, stream=stream)

    def receive(self, buffer: Tensor, peer: int, stream: Stream) -> None:
        """See ``gpu_links.Communicator``."""
        self._call(self._library.ncclRecv, buffer.data_ptr(), buffer.nbytes, _BYTES, peer, stream=stream)

    def all_reduce(self, values: Tensor, stream: Stream) -> None:
        """See ``gpu_links.Communicator``."""
        assert values.dtype is torch.float32
        assert values.is_contiguous()
        place = values.data_ptr()
        self._call(self._library.ncclAllReduce, place, place, values.numel(), _FLOATS, _SUM, stream=stream)

    def ready(self) -> bool:
        """See ``gpu_links.Communicator``."""
        state = c_int()
        with self._lock:
            _check(self._library, self._library.ncclCommGetAsyncError(self._alive(), state))
            return _check(self._library, state.value)

    def abort(self) -> None:
        """See ``gpu_links.Communicator``."""
        with self._lock:
            handle, self._handle = self._handle, c_void_p()
            if handle:
                self._library.ncclCommAbort(handle)

    def _call(self, function: Any, *arguments: int, stream: Stream) -> None:
        with self._lock:
            _check(self._library, function(*arguments, self._alive(), stream.cuda_stream))

    def _alive(self) -> c_void_p:
        if not self._handle:
            raise RuntimeError("the communicator was aborted")
        return self._handle


class Nccl:
    """A ``gpu_links.Fabric`` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Load the library.

        Raises:
            UsageError: there is none that will do.
        """
        self._device, self._library = device, load()

    def bind(self, interface_host: str) -> None:
        """Before the first communicator: NCCL reads this once. ``NCCL_SOCKET_IFNAME`` as the user set it stays."""
        if name := interface_with(interface_host):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")

    def offer(self) -> bytes:
        """See ``gpu_links.Fabric``."""
        identity = _Identity()
        _check(self._library, self._library.ncclGetUniqueId(identity))
        return bytes(identity)

    def connect(self, identity: bytes, rank: int, size: int) -> NcclCommunicator:
        """See ``gpu_links.Fabric``."""
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, _OLDEST, blocking=0)
        handle, whole = c_void_p(), _Identity.from_buffer_copy(identity)
        with torch.cuda.device(self._device):
            _check(self._library, self._library.ncclCommInitRankConfig(handle, size, whole, rank, config))
        return NcclCommunicator(self._library, handle)


def interface_with(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None if none has."""
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
