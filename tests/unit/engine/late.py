"""A device that is as late as it may be: copies run when something that was told to wait for them does, never before.
So does whatever else is queued, such as a transfer that blocks its stream until a peer joins (``wire``).

What has not been copied is full of ones (NaN as a floating value, -1 as a number), so whoever looks too early, or
writes too early, changes the numbers of a run. Memory that was freed while a copy needs it is an error. Computations
are the CPU's own and in time.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from varuna.core.devices import DeviceFacts
from varuna.engine.device.host_copies import DONE, Ready, StreamCopies
from varuna.engine.device.streams import Event
from varuna.engine.links.traffic import TransferPaths, traffic_over

_running = threading.RLock()

WAITING = object()
"""Result of work that must be asked again: its stream is blocked meanwhile."""

_HANGS_S = 60.0


class LateStream:
    """Work that runs for someone who must have it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.passed = 0

    def put(self, work: Callable[[], object]) -> None:
        with _running:
            self.queue.append(work)

    def run(self, until: int) -> bool:
        """Whether all work up to there is done."""
        with _running:
            while self.passed < until:
                if self.queue[0]() is WAITING:
                    return False
                self.queue.popleft()
                self.passed += 1
            return True


class LateEvent:
    """A point of a late stream; of the computation, one that is passed."""

    def __init__(self, stream: LateStream | None) -> None:
        with _running:
            self._stream, self._point = stream, 0 if stream is None else stream.passed + len(stream.queue)
        self._at_s = time.monotonic()

    def wait(self) -> None:
        deadline_s = time.monotonic() + _HANGS_S
        while not self.passed():
            assert time.monotonic() < deadline_s, "a stream is blocked for ever"
            time.sleep(1e-4)

    def passed(self) -> bool:
        return self._stream is None or self._stream.run(self._point)

    def seconds_since(self, earlier: Self) -> float:
        return self._at_s - earlier._at_s


class Borrower:
    """Work on memory, which it holds on to only if it was told to."""

    def __init__(self, value: Tensor) -> None:
        self._value = weakref.ref(value)
        self._kept: Tensor | None = None

    def keep(self, value: Tensor) -> None:
        if self._value() is value:
            self._kept = value

    def memory(self) -> Tensor:
        value = self._kept if self._kept is not None else self._value()
        if value is None:
            raise RuntimeError("memory was given away before it was copied")
        return value


class _Copy(Borrower):
    """One copy."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        super().__init__(source)
        self.target = target

    def __call__(self) -> None:
        with torch.no_grad():
            self.target.copy_(self.memory())


class LateStreams:
    """``engine.device.streams.Streams`` over CPU tensors."""

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

    def record_event(self, stream: LateStream | None, *, timed: bool = False) -> LateEvent:
        return LateEvent(stream)

    def wait_event(self, stream: LateStream | None, event: Event) -> None:
        if stream is None:
            event.wait()
        else:
            stream.put(lambda: None if event.passed() else WAITING)

    def copy(self, stream: LateStream, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        stream.put(_Copy(target, source))

    def fetch(self, stream: LateStream, value: Tensor) -> Tensor:
        fetched = torch.empty_like(value)
        fetched.view(torch.uint8).fill_(255) if fetched.dim() else fetched.fill_(-1)
        source = value.detach()  # the host allocator keeps it until it is copied
        self.copies += 1
        copy = _Copy(fetched, source)
        copy.keep(source)
        stream.put(copy)
        self.unkept.add(id(fetched))
        return fetched

    def record_stream(self, value: Tensor, stream: LateStream | None) -> None:
        self.unkept.discard(id(value))
        with _running:  # another thread may wait for a copy of this stream
            for work in stream.queue if stream is not None else ():
                if isinstance(work, Borrower):
                    work.keep(value)

    def allocate(self, stream: LateStream, size_bytes: int) -> Tensor:
        return self.room(size_bytes)

    def memory(self) -> DeviceFacts | None:
        return self.device

    def arena(self, size_bytes: int, streams: Sequence[LateStream]) -> Tensor:
        return self.room(size_bytes)

    def room(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), 255, dtype=torch.uint8)


class Rash(StreamCopies):
    """Says that copies are done when they are queued."""

    def copy_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready | None = None) -> Ready:
        super().copy_to_host(pairs, after)
        return DONE


class Late:
    """Gives every rank late streams, and remembers them."""

    def __init__(self, over: Callable[[LateStreams], TransferPaths] = traffic_over) -> None:
        self.made: list[LateStreams] = []
        self._over = over

    def __call__(self) -> TransferPaths:
        self.made.append(LateStreams())
        return self._over(self.made[-1])
