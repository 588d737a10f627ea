"""The seam to a device that works beside the host: its streams, events and pinned host memory.

Everything that decides on order lies above it (``device.host_copies``, ``pipeline.lookahead``) and runs in tests over
streams that are as late as they may be. A CPU has none of this.
"""

import os
from collections.abc import Sequence
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, Protocol, Self
from weakref import finalize

import torch
from torch import Tensor

from varuna.core.devices import DeviceFacts
from varuna.engine.device.capacity import held_by_others
from varuna.engine.device.faults import kind_of
from varuna.process.console import say

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_set: Any = torch._C._accelerator_setAllocatorSettings
_stream: Any = torch.cuda.Stream
_settings: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
"""Function that returns the script's settings; up to torch 2.12 it is not documented."""


@cache
def let_segments_grow(device: torch.device) -> None:
    """Have torch use expandable segments, where the driver has them and the user has made no settings.

    Not when a process begins: this is its first call of CUDA, after which no process should be forked.
    """
    if any(os.environ.get(name) for name in _VARIABLES) or _settings():
        return
    _set("expandable_segments:True")
    try:
        with torch.cuda.stream(_stream(device, priority=-1)):  # which no thread has used: no memory of it is cached
            torch.empty(1, device=device)
    except RuntimeError as error:  # as on WSL, and with old drivers
        _set("expandable_segments:False")
        if kind_of(error) is not None:
            raise
        say(f"the memory of {device} may fragment, as its driver has no expandable segments")


Stream = Any
"""A queue of the device: what is put there runs in order, and unordered with other streams."""


class Event(Protocol):
    """A point of a stream, passed once all that was queued before it is done."""

    def wait(self) -> None:
        """Block this thread until the point is passed."""

    def passed(self) -> bool:
        """Return whether the device has reached the event."""

    def seconds_since(self, earlier: Self) -> float:
        """Return the seconds between two timed events that have passed."""


class Streams(Protocol):
    """The operations on a device's streams that copies, lookahead and clocks need."""

    def stream(self) -> Stream:
        """Create a stream."""

    def computing(self) -> Stream:
        """Return the stream that this thread's computations go to."""

    def record_event(self, stream: Stream, *, timed: bool = False) -> Event:
        """Return the point after everything that is queued on ``stream`` now."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let what is queued on ``stream`` from now on run after ``event``."""

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queue a copy within the device, or between pinned host memory and it; returns at once."""

    def fetch(self, stream: Stream, value: Tensor) -> Tensor:
        """Queue a copy of a host tensor into device memory that belongs to ``stream``; returns at once."""

    def allocate(self, stream: Stream, size_bytes: int) -> Tensor:
        """Allocate device memory that belongs to ``stream``, as bytes."""

    def record_stream(self, value: Tensor, stream: Stream) -> None:
        """Keep the memory of ``value`` from being given out before ``stream`` has passed what is queued on it now."""

    def room(self, size_bytes: int) -> Tensor:
        """Allocate pinned host memory for a moment, as bytes; more may be pinned, and is used again."""

    def arena(self, size_bytes: int, streams: Sequence[Stream]) -> Tensor:
        """Allocate pinned host memory of that size, as bytes, which only these streams copy from and to."""

    def memory(self) -> DeviceFacts | None:
        """Return the device's own; None if it is not known."""


class CudaEvent:
    """An ``Event`` of CUDA. A thread that waits for it sleeps; it does not spin."""

    def __init__(self, stream: Stream, *, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """Block this thread until the point is passed."""
        self.event.synchronize()

    def passed(self) -> bool:
        """Return whether the device has reached the event."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: "CudaEvent") -> float:
        """Return the seconds between two timed events that have passed."""
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """``Streams`` of one GPU.

    Pinned memory and streams come from torch's caches: memory that a queued copy still needs is not given out again,
    and what was given back is reused without a call to the driver.
    """

    def __init__(self, device: torch.device) -> None:
        """Make ``device`` this thread's current one: seeds and whatever else names none are meant for it."""
        torch.cuda.set_device(device)
        let_segments_grow(device)
        self._device, self._others_bytes = device, held_by_others(device)

    def stream(self) -> Stream:
        """Create a stream, whose kernels go before those of computations that wait: NCCL's are short, and awaited."""
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def computing(self) -> Stream:
        """Return the stream that this thread's computations go to."""
        return torch.cuda.current_stream(self._device)

    def record_event(self, stream: Stream, *, timed: bool = False) -> CudaEvent:
        """Return the point after everything that is queued on ``stream`` now."""
        return CudaEvent(stream, timed=timed)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let what is queued on ``stream`` from now on run after ``event``."""
        assert isinstance(event, CudaEvent)
        stream.wait_event(event.event)

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queue a copy within the device, or between pinned host memory and it; returns at once."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def fetch(self, stream: Stream, value: Tensor) -> Tensor:
        """Queue a copy of a host tensor into device memory that belongs to ``stream``; returns at once."""
        if not value.is_pinned():  # from pageable memory CUDA would wait for the stream first
            value = torch.empty_like(value, pin_memory=True).copy_(value)
        with torch.cuda.stream(stream):
            return value.to(self._device, non_blocking=True)

    def allocate(self, stream: Stream, size_bytes: int) -> Tensor:
        """Allocate device memory that belongs to ``stream``, as bytes."""
        with torch.cuda.stream(stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def record_stream(self, value: Tensor, stream: Stream) -> None:
        """Keep the memory of ``value`` from being given out before ``stream`` has passed what is queued on it now."""
        if value.is_cuda:  # host memory is torch's own care, or was copied at once
            value.record_stream(stream)

    def room(self, size_bytes: int) -> Tensor:
        """Allocate pinned host memory for a moment, as bytes; torch pins a power of two."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def arena(self, size_bytes: int, streams: Sequence[Stream]) -> Tensor:
        """Allocate pinned host memory of that size, as bytes, which only these streams copy from and to.

        Raises:
            RuntimeError: the driver does not pin so much.
        """
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        arena = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # all pages are there before the driver has locks
        _check(_cudart().cudaHostRegister(arena.data_ptr(), size_bytes, 0))
        finalize(memory, self._unpin, arena.data_ptr(), streams).atexit = False
        return arena

    def _unpin(self, address: int, streams: Sequence[Stream]) -> None:
        """Unpin memory that is not used any more, but still there: let copies end first."""
        for stream in streams:
            self.record_event(stream).wait()
        _check(_cudart().cudaHostUnregister(address))

    def memory(self) -> DeviceFacts:
        """Return the bytes of the GPU, without a call to it: it may hang."""
        found = torch.cuda.get_device_properties(self._device)
        others = min(self._others_bytes, found.total_memory)
        return DeviceFacts(name=str(found.uuid), memory_bytes=found.total_memory, others_bytes=others)


_cudart: Any = torch.cuda.cudart
_check: Any = torch.cuda.check_error


def streams_of(device: torch.device) -> Streams | None:
    """Make the streams of a GPU; None for the CPU, which is done when a call returns."""
    return CudaStreams(device) if device.type == "cuda" else None
