"""Copies between a device and host memory: messages, samples, sums of gradients, saves, state, stashed inputs.

On a GPU they run on two streams, one for each direction, beside the computation. On a CPU values are in host memory
already.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from varuna.engine.device.streams import Event, Streams

HOST = torch.device("cpu")
_ALIGNMENT = 512  # bytes, of tensors in one piece of memory: as torch's allocators give it, since kernels look at it


class Ready(Protocol):
    """Something that will be finished; on a GPU, a point of a stream."""

    def wait(self) -> None:
        """Block this thread until it is finished."""

    def passed(self) -> bool:
        """Return whether it is finished."""


class Done:
    """A ``Ready`` that is already finished."""

    def wait(self) -> None:
        """Return at once."""

    def passed(self) -> bool:
        """Return true."""
        return True


DONE = Done()


class HostCopies:
    """Copies of one kind; what a method promises holds for every device.

    These are a CPU's, done when a call returns. ``copy_to_device`` and ``at_host`` give the values themselves, so
    nothing is copied only because a GPU would need it.
    """

    def room(self, size_bytes: int) -> Tensor:
        """Allocate memory to copy from and to, as bytes, for a moment; pinned on a GPU's host."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def arena(self, size_bytes: int) -> Tensor:
        """Allocate the same for longer, and of no more than that size."""
        return self.room(size_bytes)

    def room_for(self, value: Tensor) -> Tensor:
        """Allocate memory with the shape and dtype of ``value``."""
        return self.room(value.nbytes).view(value.dtype).view(value.shape)

    def homes_for(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Allocate memory for longer, in one piece, with the shapes and dtypes of ``values``."""
        return laid_out(values, self.arena(size_together(values)))

    def place(self, size_bytes: int) -> Tensor:
        """Allocate memory of the device for longer, as bytes, that ``overwrite`` writes to."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def at_rest(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return ``values``, in host memory, where copies can start: themselves, if they can start there."""
        return list(values)

    def point(self) -> Ready:
        """Mark the end of what this thread has had computed so far."""
        return DONE

    def copy_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready | None = None) -> Ready:
        """Copy values of the device (first) into host memory (second), as they are after a ``point``; None: now.

        Until the result is done the host memory may be neither read nor written. The values may be freed at once.
        """
        for value, target in pairs:
            target.copy_(value)
        return DONE

    def compute_after(self, copied: Ready) -> None:
        """Let what this thread computes from now on run after a result of ``copy_to_host`` or ``fetch``."""

    def fetch(self, values: Sequence[Tensor], after: Ready = DONE) -> tuple[list[Tensor], Ready]:
        """Copy values of host memory to the device, once a ``copy_to_host`` that wrote them is done.

        Computations must run after (``compute_after``) the second result before they use the first.
        """
        return [value.clone() for value in values], DONE

    def copy_to_device(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values of host memory for what this thread computes from now on; they may not be written any more."""
        return dict(values)

    def overwrite(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready = DONE) -> Ready:
        """Copy host memory, where copies can start (second), over values of the device (first), after a ``point``."""
        for value, source in pairs:
            value.copy_(source)
        return DONE

    def at_host(self, value: Tensor, after: Ready, room: Callable[[Tensor], Tensor]) -> AbstractContextManager[Tensor]:
        """Give ``value`` in host memory, as it is after a ``point``; what is written there is in ``value`` at the end.

        Blocks this thread at both ends. ``value`` belongs to the block meanwhile; ``room`` gives memory like it, where
        that is needed.
        """
        return nullcontext(value)


CPU_COPIES = HostCopies()


class StreamCopies(HostCopies):
    """The copies of a GPU: through pinned memory, on two streams.

    Down follows the computation, up follows nothing: what has arrived crosses while the device still computes.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.stream(), streams.stream()

    def room(self, size_bytes: int) -> Tensor:
        """Allocate pinned memory."""
        return self._streams.room(size_bytes)

    def arena(self, size_bytes: int) -> Tensor:
        """Allocate and pin; only these two streams copy from and to it."""
        return self._streams.arena(size_bytes, (self._down, self._up))

    def at_rest(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy those that are not pinned."""
        moved = [value for value in values if not value.is_pinned()]
        homes = iter(self.homes_for(moved))
        return [value if value.is_pinned() else next(homes).copy_(value) for value in values]

    def point(self) -> Event:
        """Mark the computing stream."""
        return self._streams.record_event(self._streams.computing())

    def copy_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready | None = None) -> Ready:
        """Queue the copies."""
        streams = self._streams
        streams.wait_event(self._down, self.point() if after is None else _event(after))
        for value, target in pairs:
            streams.copy(self._down, target, value)
            # The caller may free the value at once: its memory must stay until this copy has passed.
            streams.record_stream(value, self._down)
        return streams.record_event(self._down)

    def compute_after(self, copied: Ready) -> None:
        """Let the computing stream wait, not this thread."""
        if copied is not DONE:
            self._streams.wait_event(self._streams.computing(), _event(copied))

    def fetch(self, values: Sequence[Tensor], after: Ready = DONE) -> tuple[list[Tensor], Ready]:
        """Queue the copies.

        Each value gets memory of its own: kernels may be chosen by alignment, which must not depend on the message.
        """
        streams = self._streams
        if after is not DONE:
            streams.wait_event(self._up, _event(after))
        fetched = [streams.fetch(self._up, value) for value in values]
        for value in fetched:  # its memory is not used again before what is computed from it is through
            streams.record_stream(value, streams.computing())
        return fetched, streams.record_event(self._up)

    def copy_to_device(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Queue the copies, and let the computation follow them."""
        fetched, arrived = self.fetch(list(values.values()))
        self.compute_after(arrived)
        return dict(zip(values, fetched, strict=True))

    def place(self, size_bytes: int) -> Tensor:
        """Allocate device memory, which computations use as well."""
        place = self._streams.allocate(self._up, size_bytes)
        self._streams.record_stream(place, self._streams.computing())
        return place

    def overwrite(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready = DONE) -> Ready:
        """Queue the copies."""
        streams = self._streams
        if after is not DONE:
            streams.wait_event(self._up, _event(after))
        for value, source in pairs:
            streams.copy(self._up, value, source)
            streams.record_stream(value, self._up)
        return streams.record_event(self._up)

    @contextmanager
    def at_host(self, value: Tensor, after: Ready, room: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Copy through the memory that ``room`` gives."""
        host = room(value)
        self.copy_to_host([(value, host)], after).wait()
        yield host
        self.overwrite([(value, host)]).wait()


def size_together(values: Sequence[Tensor]) -> int:
    """Return the bytes of one piece of memory for all of them."""
    return sum(value.nbytes + -value.nbytes % _ALIGNMENT for value in values)


def laid_out(values: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Make views of the memory, one behind the other, with the shapes and dtypes of ``values``."""
    starts = accumulate((value.nbytes + -value.nbytes % _ALIGNMENT for value in values), initial=0)
    return [
        memory[start : start + value.nbytes].view(value.dtype).view(value.shape)
        for start, value in zip(starts, values, strict=False)
    ]


def _event(ready: Ready) -> Event:
    assert not isinstance(ready, Done), "a point of another device"
    event: Event = ready  # type: ignore[assignment]
    return event
