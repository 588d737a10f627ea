"""How tensors that live in host memory pass through the device: offloaded optimizer state, inputs that wait for R.

Unlike what a lane carries they come back to where they were, and what sets out may be waited for later.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from varuna.engine.device.streams import Event, Streams

HOST = torch.device("cpu")


class Ferry(Protocol):
    """Takes tensors to the device and back."""

    def room_for(self, value: Tensor) -> Tensor:
        """Host memory of the form of ``value``."""

    def at_rest(self, value: Tensor) -> Tensor:
        """``value``, which is in host memory, where it may stay: itself, if it is there."""

    def fetch(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device, to be used after ``meet``; they start after what was brought back before."""

    def meet(self) -> None:
        """What is computed from now on sees what was fetched so far; it does not wait for what leaves."""

    def bring_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy from the device (first) into host memory (second), after what is computed so far; see ``settle``."""

    def settle(self) -> None:
        """Return once host memory holds all that was brought back; it needs no device memory any more."""


class PlainFerry:
    """Of a CPU, or of a device without streams: copies that are done when a call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def room_for(self, value: Tensor) -> Tensor:
        """Allocate plain memory."""
        return torch.empty(value.shape, dtype=value.dtype)

    def at_rest(self, value: Tensor) -> Tensor:
        """Return the tensor itself."""
        return value

    def fetch(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy at once."""
        return [value.to(self._device, copy=True) for value in values]

    def meet(self) -> None:
        """Return at once: nothing is on its way."""

    def bring_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy at once."""
        for source, target in pairs:
            target.copy_(source)

    def settle(self) -> None:
        """Return at once: nothing is on its way."""


class StreamFerry:
    """Of a GPU: pinned memory and two streams, one for each direction."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._in, self._out = streams.stream(), streams.stream()
        self._fetched: Event | None = None
        self._left: Event | None = None

    def room_for(self, value: Tensor) -> Tensor:
        """Allocate pinned memory."""
        return self._streams.room(value.nbytes).view(value.dtype).view(value.shape)

    def at_rest(self, value: Tensor) -> Tensor:
        """Itself if it is pinned."""
        return value if value.is_pinned() else self.room_for(value).copy_(value)

    def fetch(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Queue the copies; see ``Ferry.fetch``."""
        streams = self._streams
        if self._left is not None:
            streams.follow(self._in, self._left)
        fetched = [streams.fetch(self._in, value) for value in values]
        self._fetched = streams.mark(self._in)
        for value in fetched:  # its memory is not used again before what is computed from it is through
            streams.keep(value, streams.computing())
        return fetched

    def meet(self) -> None:
        """Let the computation follow."""
        if self._fetched is not None:
            self._streams.follow(self._streams.computing(), self._fetched)

    def bring_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queue the copies after the computation."""
        streams = self._streams
        streams.follow(self._out, streams.mark(streams.computing()))
        for source, target in pairs:
            streams.copy(self._out, target, source)
            streams.keep(source, self._out)
        self._left = streams.mark(self._out)

    def settle(self) -> None:
        """Wait for the copies out."""
        if self._left is not None:
            self._left.wait()


def ferry_of(device: torch.device, streams: Streams | None) -> Ferry:
    """For a device with these streams; None: it has none."""
    return PlainFerry(device) if streams is None else StreamFerry(streams)
