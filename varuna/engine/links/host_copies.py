"""How values pass between the device and what links take: what crosses them, samples, sums of gradients, what is saved.

Gloo takes host memory, NCCL the device's. On a GPU each kind of traffic has a lane of its own, two streams, so that
neither way waits for the other nor for another kind; on a CPU there is nothing to pass, and nothing is copied that was
not before.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from varuna.core.model import Links
from varuna.core.ready import DONE, Done, Ready
from varuna.engine.device.streams import Event, Streams, streams_of
from varuna.engine.links.gpu_links import Fabric
from varuna.engine.links.nccl import Nccl


class Lane(Protocol):
    """A way to host memory and back."""

    def room(self, size_bytes: int) -> Tensor:
        """Host memory that this lane copies from and to, as bytes."""

    def point(self) -> Ready:
        """Behind what this thread has had computed so far."""

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]], behind: Ready | None = None) -> Ready:
        """Copy values (first) into host memory (second), as they are after a ``point``; by default that of now.

        Until the result is done the host memory may be neither read nor written. The values may be freed at once.
        """

    def follow(self, copied: Ready) -> None:
        """Let what this thread computes from now on run after what ``down`` has returned."""

    def up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of host memory, for what this thread computes from now on; they may not be written any more."""

    def at_host(self, value: Tensor, behind: Ready) -> AbstractContextManager[Tensor]:
        """``value`` in host memory, as it is after a ``point``; what is written there is in ``value`` at the end.

        Blocks this thread at both ends. ``value`` belongs to the block meanwhile.
        """


class HostLane:
    """The lane of a CPU: values are in host memory already."""

    def room(self, size_bytes: int) -> Tensor:
        """Allocate plain memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def point(self) -> Ready:
        """Return a point that is already reached."""
        return DONE

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]], behind: Ready | None = None) -> Ready:
        """Copy at once."""
        for value, target in pairs:
            target.copy_(value)
        return DONE

    def follow(self, copied: Ready) -> None:
        """Return at once."""

    def up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same tensors."""
        return dict(values)

    def at_host(self, value: Tensor, behind: Ready) -> AbstractContextManager[Tensor]:
        """Return the same tensor."""
        return nullcontext(value)


class StagedLane:
    """The lane of a GPU through pinned memory, on two streams.

    Down follows the computation, up follows nothing: what has arrived crosses while the device still computes.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.stream(), streams.stream()

    def room(self, size_bytes: int) -> Tensor:
        """Allocate pinned memory."""
        return self._streams.room(size_bytes)

    def point(self) -> Event:
        """Return the point after what this thread has queued so far."""
        return self._streams.mark(self._streams.computing())

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]], behind: Ready | None = None) -> Event:
        """Queue the copies; see ``Lane.down``."""
        streams = self._streams
        streams.follow(self._down, self.point() if behind is None else _event(behind))
        for value, target in pairs:
            streams.copy(self._down, target, value)
            streams.keep(value, self._down)
        return streams.mark(self._down)

    def follow(self, copied: Ready) -> None:
        """Let the computation wait for ``copied``."""
        if copied is not DONE:
            self._streams.follow(self._streams.computing(), _event(copied))

    def up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Queue the copies, and let the computation follow them; see ``Lane.up``.

        Each value gets memory of its own: kernels may be chosen by alignment, which must not depend on the message.
        """
        streams = self._streams
        fetched = {name: streams.fetch(self._up, value) for name, value in values.items()}
        computing = streams.computing()
        streams.follow(computing, streams.mark(self._up))
        for value in fetched.values():
            streams.keep(value, computing)
        return fetched

    @contextmanager
    def at_host(self, value: Tensor, behind: Ready) -> Iterator[Tensor]:
        """See ``Lane.at_host``."""
        streams = self._streams
        host = self.room(value.nbytes).view(value.dtype).view(value.shape)
        self.down([(value, host)], behind).wait()
        yield host
        streams.copy(self._up, value, host)
        streams.keep(value, self._up)
        streams.mark(self._up).wait()


class DirectLane(StagedLane):
    """Of a GPU whose links go from device to device: messages are packed, and come, in device memory."""

    def room(self, size_bytes: int) -> Tensor:
        """Allocate device memory."""
        return self._streams.take(self._down, size_bytes)

    def up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors, which have arrived; their memory stays until what computes with them is through."""
        computing = self._streams.computing()
        for value in values.values():
            self._streams.keep(value, computing)
        return dict(values)


def _event(ready: Ready) -> Event:
    assert not isinstance(ready, Done), "a point of another lane's device"
    event: Event = ready  # type: ignore[assignment]
    return event


class Lanes(NamedTuple):
    """The lanes of a rank, one for each kind of traffic."""

    links: Lane = HostLane()
    """samples, activations and their gradients"""
    sums: Lane = HostLane()
    """sums of gradients on their way to other ranks"""
    streams: Streams | None = None
    """None: the training thread itself computes"""
    saves: Lane = HostLane()
    """state on its way into a checkpoint"""
    direct: Lane = HostLane()
    """what crosses links that go by ``fabric``"""
    fabric: Fabric | None = None
    """how this device reaches others without the host, where it may"""


def lanes_of(device: torch.device, links: Links = "host") -> Lanes:
    """Return the lanes of a worker on ``device``.

    Raises:
        UsageError: there is no NCCL for such links.
    """
    return lanes_over(streams_of(device), Nccl(device) if links == "nccl" and device.type == "cuda" else None)


def lanes_over(streams: Streams | None, fabric: Fabric | None = None) -> Lanes:
    """Return lanes over ``streams``."""
    if streams is None:
        return Lanes()
    links, sums, saves = (StagedLane(streams) for _ in range(3))
    return Lanes(links, sums, streams, saves, HostLane() if fabric is None else DirectLane(streams), fabric)
