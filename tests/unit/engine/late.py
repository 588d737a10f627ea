"""A device that is as late as it may be: copies run when something that was told to wait for them does, never before.

What has not been copied is full of ones (NaN as a floating value, -1 as a number), so whoever looks too early, or
writes too early, changes the numbers of a run. Memory that was freed while a copy needs it is an error. Computations
are the CPU's own and in time.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from varuna.core.devices import DeviceFacts
from varuna.engine.device import Event

_running = threading.RLock()


class LateStream:
    """Work that waits for someone who must have it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.passed = 0

    def put(self, work: Callable[[], object]) -> None:
        with _running:
            self.queue.append(work)

    def run(self, until: int) -> None:
        with _running:
            while self.passed < until:
                self.passed += 1
                self.queue.popleft()()


class LateEvent:
    """A point of a late stream; of the computation, one that is passed."""

    def __init__(self, stream: LateStream | None) -> None:
        with _running:
            self._stream, self._point = stream, 0 if stream is None else stream.passed + len(stream.queue)
        self._at_s = time.monotonic()

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.run(self._point)

    def seconds_since(self, earlier: Self) -> float:
        return self._at_s - earlier._at_s


class _Copy:
    """One copy, which holds on to its source only if it was told to."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target = target
        self._source = weakref.ref(source)
        self.kept: Tensor | None = None

    def __call__(self) -> None:
        source = self.kept if self.kept is not None else self._source()
        if source is None:
            raise RuntimeError("memory was given away before it was copied")
        with torch.no_grad():
            self.target.copy_(source)


class LateStreams:
    """``engine.device.Streams`` over CPU tensors."""

    def __init__(self) -> None:
        self.copies = 0
        self.unkept: set[int] = set()  # ids of fetched values whose user has not said so
        self.made: list[LateStream] = []
        self.device: DeviceFacts | None = None
        self.compute: LateStream | None = None  # a test's own, where it is the computation that is late

    def stream(self) -> LateStream:
        self.made.append(LateStream())
        return self.made[-1]

    @property
    def left(self) -> int:
        """Copies that nobody has waited for."""
        return sum(isinstance(work, _Copy) for stream in self.made for work in stream.queue)

    def computing(self) -> LateStream | None:
        return self.compute

    def mark(self, stream: LateStream | None, *, timed: bool = False) -> LateEvent:
        return LateEvent(stream)

    def follow(self, stream: LateStream | None, event: Event) -> None:
        if stream is None:
            event.wait()
        else:
            stream.put(event.wait)

    def copy(self, stream: LateStream, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        stream.put(_Copy(target, source))

    def fetch(self, stream: LateStream, value: Tensor) -> Tensor:
        fetched = torch.empty_like(value)
        fetched.view(torch.uint8).fill_(255) if fetched.dim() else fetched.fill_(-1)
        source = value.detach()  # the host allocator keeps it until it is copied
        self.copies += 1
        copy = _Copy(fetched, source)
        copy.kept = source
        stream.put(copy)
        self.unkept.add(id(fetched))
        return fetched

    def keep(self, value: Tensor, stream: LateStream | None) -> None:
        self.unkept.discard(id(value))
        for work in stream.queue if stream is not None else ():
            if isinstance(work, _Copy) and work._source() is value:
                work.kept = value

    def memory(self) -> DeviceFacts | None:
        return self.device

    def room(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), 255, dtype=torch.uint8)
