"""Counts of the null GPU: calls since a moment, and bytes now and at most."""

import ctypes
from functools import cache
from typing import Any, NamedTuple


class Counts(NamedTuple):
    """In the order of ``runtime.cpp``: calls since ``restart``, then bytes."""

    launches: int
    matmuls: int
    """among them"""
    stream_syncs: int
    event_syncs: int
    device_syncs: int
    reads: int
    """copies from a device to the host"""
    pageable_reads: int
    """among them, those that block the host"""
    pageable_writes: int
    mallocs: int
    events: int
    """made"""
    records: int
    """of events"""
    read_bytes: int
    written_bytes: int
    device_bytes: int
    peak_device_bytes: int
    pinned_bytes: int
    peak_pinned_bytes: int


@cache
def _library() -> Any:
    library = ctypes.CDLL("libnullcuda.so")  # torch has loaded it
    library.null_gpu_count.restype = ctypes.c_long
    return library


def counted() -> Counts:
    """Return all counts of this process."""
    return Counts(*(_library().null_gpu_count(place) for place in range(len(Counts._fields))))


def restart() -> None:
    """Count calls from 0, and the most bytes from those of now."""
    _library().null_gpu_restart()
