"""What crosses a link: the tensors of one cut as one contiguous message, and the digests of the samples.

Both ends know the layout from the plan and the number of examples, so nothing is negotiated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.engine.lanes import HostLane, Lane, Ready
from varuna.partition.split import Crossing

_ALIGNMENT_BYTES = 64
_DIGEST_BYTES = 8
_HOST = HostLane()


class Packed(NamedTuple):
    """A message in host memory."""

    buffer: Tensor
    """bytes; nobody looks at them before they are ready"""
    ready: Ready

    def whole(self) -> Tensor:
        """The buffer; blocks until it is ready."""
        self.ready.wait()
        return self.buffer


@dataclass(frozen=True)
class Layout:
    """Offsets of a message's tensors for a given number of examples."""

    crossings: tuple[Crossing, ...]
    examples: int
    digests: bool
    """whether one signed 64-bit digest per sample follows (activations only)"""

    @cached_property
    def offsets_bytes(self) -> list[int]:
        """Start of each tensor, then the start of the digests, then the end."""
        offsets = [0]
        for crossing in self.crossings:
            size = torch.Size(crossing.shape(self.examples)).numel() * crossing.dtype.itemsize
            offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return [*offsets, offsets[-1] + _DIGEST_BYTES * self.examples * self.digests]

    @property
    def size_bytes(self) -> int:
        """Length of the message; never 0, which gloo would not send."""
        return max(self.offsets_bytes[-1], _DIGEST_BYTES)

    def pack(self, values: Mapping[str, Tensor], digests: Sequence[int] = (), lane: Lane = _HOST) -> Packed:
        """Copy ``values`` (by crossing name) into one host buffer, by ``lane``; a missing one is sent as zeros."""
        buffer = lane.room(self.size_bytes)
        pairs: list[tuple[Tensor, Tensor]] = []
        for crossing, start in zip(self.crossings, self.offsets_bytes, strict=False):
            target = self._view(buffer, crossing, start)
            value = values.get(crossing.name)
            if value is None:
                target.zero_()
            else:
                assert value.shape == target.shape, f"{crossing.name} crosses as {target.shape}, it is {value.shape}"
                pairs.append((value, target))
        if self.digests:
            self._digest_view(buffer).copy_(torch.tensor(digests or [0] * self.examples, dtype=torch.int64))
        return Packed(buffer, lane.down(pairs))

    def unpack(self, buffer: Tensor, lane: Lane = _HOST) -> dict[str, Tensor]:
        """What ``lane`` makes of views into ``buffer``, by crossing name: themselves on a CPU, copies on a GPU."""
        return lane.up(
            {
                crossing.name: self._view(buffer, crossing, start)
                for crossing, start in zip(self.crossings, self.offsets_bytes, strict=False)
            }
        )

    def digests_of(self, buffer: Tensor) -> list[int]:
        """The digests that ``pack`` was given; all 0 if the sender reads no inputs."""
        digests: list[int] = self._digest_view(buffer).tolist()
        return digests

    def _view(self, buffer: Tensor, crossing: Crossing, start: int) -> Tensor:
        shape = torch.Size(crossing.shape(self.examples))
        end = start + shape.numel() * crossing.dtype.itemsize
        return buffer[start:end].view(crossing.dtype).view(shape)

    def _digest_view(self, buffer: Tensor) -> Tensor:
        start, end = self.offsets_bytes[-2:]
        return buffer[start:end].view(torch.int64)
