"""Errors of a device or its machine, told from those of the user's code and of links, which have the same types.

CUDA reports most errors at a later call, on whichever thread makes it, and from then on at every call of the process.
So what is wrong says itself by its type and its text, never by where it was raised.
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from enum import Enum

import torch

from varuna.core.devices import DeviceFault
from varuna.core.errors import DataError, DeviceError, VarunaError
from varuna.core.units import format_bytes
from varuna.engine.device.capacity import held_by_others

_ACCELERATOR: type[RuntimeError] | tuple[()] = getattr(torch, "AcceleratorError", ())
HANGS = "it hangs"
"""Fault of a device that says nothing."""
_FULL, _USERS = 2, (1, 9, 98, 209, 710)
"""Numbers of CUDA: out of memory; and what fails on every device of its kind: an invalid argument or launch, a kernel
that torch was not built with, an assertion on the device."""
_ASSERT = "device-side assert"
_LIBRARY = re.compile(r"(?:CU[A-Z]+|NCCL)_STATUS_([A-Z_]+)|^NCCL.*unhandled (cuda) error", re.DOTALL)
"""Of cuBLAS, cuDNN and their like; NCCL's other errors are those of links."""
_BREAKS = ("EXECUTION_FAILED", "INTERNAL_ERROR", "MAPPING_ERROR", "NOT_INITIALIZED", "cuda")
_MACHINES = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ENXIO", "ENODEV", "ENOMEM", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "EREMOTEIO", "EUCLEAN"),
        *("ETIMEDOUT", "ECONNRESET", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH", "ENETDOWN"),
    )
    if hasattr(errno, name)
)
"""Of disks, mounts, networks and host memory: what the code asked for was right, and may be had elsewhere."""


class Kind(Enum):
    """The origin of an error: the device, the machine around it, or the code."""

    BROKEN = "the device's"
    MACHINE = "of the machine around it"
    FULL = "the device's, which is whole"
    USERS = "the code's"


class DeviceFull(Exception):
    """Error: a device has too little memory for a step, of which nothing is applied: the worker gets less to do."""

    def __init__(self, who: str, step: int, fault: DeviceFault) -> None:
        super().__init__(f"{who} ran out of memory in step {step}: {fault.error}")
        self.fault = fault


def kind_of(error: BaseException) -> Kind | None:
    """Return the origin of an error of a device or machine; None: of neither. What caused an error counts, too."""
    return next((kind for each in _chain(error) if (kind := _own_kind(each)) is not None), None)


def fault_of(error: BaseException) -> DeviceFault | None:
    """Return the fault of this thread's device, or of this machine, if that is why an error was raised.

    Varuna's own errors say what to do about a disk or a network, but for what happens under ``dataset[i]``.
    """
    kind, own = kind_of(error), isinstance(error, VarunaError) and not isinstance(error, DataError)
    if kind is None or kind is Kind.USERS or (own and kind is Kind.MACHINE):
        return None
    first = next(each for each in _chain(error) if _own_kind(each) is kind)
    line = str(first).strip().partition("\n")[0].partition(" Of the allocated memory")[0]
    text = HANGS if isinstance(first, DeviceError) else line[:300]
    if kind is Kind.MACHINE:
        return DeviceFault(error=f"{type(first).__name__}: {text}"[:300], of_machine=True)
    is_memory = kind is Kind.FULL
    return DeviceFault(error=text, device=_device(), is_memory=is_memory, others_bytes=_others_bytes() * is_memory)


def in_words(fault: DeviceFault) -> str:
    """Explain a fault to people who see it without a manager."""
    if fault.of_machine:
        return (
            "This machine has failed, not the script, unless others fail in the same place. Look at its disks, mounts, "
            "memory and network (df, mount, dmesg), then start the same command again. `varuna run` and agents go on "
            "without."
        )
    where = f"GPU {fault.device}" if fault.device else "The GPU"
    if fault.is_memory:
        others = f" beside {format_bytes(fault.others_bytes)} of other processes" if fault.others_bytes else ""
        return f"{where} has too little memory for what this process does{others}: lower micro_batch=, or add workers."
    return (
        f"{where} has failed, not the script, unless other GPUs fail in the same place. Look for Xid in the "
        "kernel's log (dmesg), then start the same command again. `varuna run` and agents go on without such a GPU."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from or in place of."""
    while error is not None:
        yield error
        error = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__


def _own_kind(error: BaseException) -> Kind | None:
    if isinstance(error, DeviceError):
        return Kind.BROKEN
    if isinstance(error, torch.OutOfMemoryError):
        return Kind.FULL
    if isinstance(error, MemoryError):
        return Kind.MACHINE
    if isinstance(error, OSError):
        return Kind.MACHINE if error.errno in _MACHINES else None
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if status := _LIBRARY.search(text):
        said = status[1] or status[2]
        return Kind.FULL if said == "ALLOC_FAILED" else Kind.BROKEN if said in _BREAKS else Kind.USERS
    if "DefaultCPUAllocator" in text:
        return Kind.MACHINE
    if not (isinstance(error, _ACCELERATOR) or text.startswith("CUDA error")):
        return None
    number = getattr(error, "error_code", None)
    if number in _USERS or _ASSERT in text:
        return Kind.USERS
    return Kind.FULL if number == _FULL or text.startswith("CUDA error: out of memory") else Kind.BROKEN


def _device() -> str:
    """Return the name of this thread's GPU, which torch remembers even if the GPU says nothing any more."""
    with contextlib.suppress(Exception):
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return ""


def _others_bytes() -> int:
    """Return the bytes that other processes hold of this thread's GPU, as far as it says."""
    with contextlib.suppress(Exception):
        return held_by_others(torch.cuda.current_device())
    return 0
