"""Messages on a link: the tensors of one cut as one contiguous message, and the digests of the samples.

    whole      | tensor 0 | pad | tensor 1 | pad | rows, samples | digest of each example | stamp |
    by itself  body, on the device: | tensor 0 | pad | ...       header: | rows, samples | digests | stamp |

Both ends know the layout from the plan and the number of examples, so nothing is negotiated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.engine.device.host_copies import CPU_COPIES, HostCopies, Ready
from varuna.engine.links.trips import STAMP_BYTES
from varuna.partition.cut.split import Crossing

_ALIGNMENT_BYTES = 64
_DEVICE_ALIGNMENT_BYTES = 512
"""Alignment of torch's own allocations: kernels may be chosen by it, and arrivals are used where they lie."""
_DIGEST_BYTES = 8


class Packed(NamedTuple):
    """A message that is ready to be sent, or will be."""

    buffer: Tensor
    """bytes in host memory, which may be read once they are ready"""
    ready: Ready
    body: Tensor | None = None
    """bytes in device memory, of a message whose tensors travel by themselves"""

    def whole(self) -> Tensor:
        """Return the buffer; block until it is ready."""
        self.ready.wait()
        return self.buffer


class DeviceMessage(NamedTuple):
    """The arrived parts of a message whose tensors travel by themselves."""

    header: Tensor
    """bytes in host memory: the digests"""
    body: Tensor
    """bytes in device memory: the tensors"""


class There(NamedTuple):
    """Rows and samples of a micro-batch: ``collate=`` may leave samples out, so the plan does not know them."""

    rows: int
    """of its tensors"""
    samples: int
    """that it counts for"""


@dataclass(frozen=True)
class Layout:
    """Offsets of a message's tensors for a given number of examples."""

    crossings: tuple[Crossing, ...]
    examples: int
    digests: bool
    """whether what is there follows, and one signed 64-bit digest per sample (activations only)"""
    apart: bool = False
    """the tensors travel from device to device, after a header with what the host must see"""
    rows: int | None = None
    """of the tensors, if they are fewer than examples: the message is as long"""
    sizes: tuple[int, ...] = ()
    """open sizes of the micro-batch"""

    @cached_property
    def offsets_bytes(self) -> list[int]:
        """Start of each tensor, then the start of the digests, then the end."""
        # By ``examples``, not ``rows``: the digests' place must be known before the message says how many rows it has.
        offsets, alignment = [0], _DEVICE_ALIGNMENT_BYTES if self.apart else _ALIGNMENT_BYTES
        for crossing in self.crossings:
            size = torch.Size(crossing.shape(self.examples, self.sizes)).numel() * crossing.dtype.itemsize
            offsets.append(-(-(offsets[-1] + size) // alignment) * alignment)
        return [*offsets, offsets[-1] + _DIGEST_BYTES * (len(There._fields) + self.examples) * self.digests]

    @property
    def size_bytes(self) -> int:
        """Length of the message, or of its header; the link writes its stamp at the end."""
        first = self.offsets_bytes[-2] if self.apart else 0
        return self.offsets_bytes[-1] - first + STAMP_BYTES

    @property
    def body_bytes(self) -> int:
        """Length of the body, in bytes, if tensors travel by themselves: at least 1; else 0."""
        return max(self.offsets_bytes[-2], 1) if self.apart else 0

    def pack(
        self,
        values: Mapping[str, Tensor],
        digests: Sequence[int] = (),
        copies: HostCopies = CPU_COPIES,
        there: There | None = None,
    ) -> Packed:
        """Copy ``values`` (by crossing name) into one buffer, by ``copies``; a missing one is sent as zeros.

        Args:
            values: of the shapes of this layout.
            digests: of the samples; none if they were not read.
            copies: they go by.
            there: what is there of the samples, in front of the digests. Default: all.
        """
        # Without a body of their own, tensors are packed into the one buffer that is sent.
        body = copies.room(self.body_bytes or self.size_bytes)
        buffer = torch.empty(self.size_bytes, dtype=torch.uint8) if self.apart else body
        pairs: list[tuple[Tensor, Tensor]] = []
        for crossing, start in zip(self.crossings, self.offsets_bytes, strict=False):
            target = self._view(body, crossing, start)
            value = values.get(crossing.name)
            if value is None and not self.apart:
                # A gradient that no later stage made: the receiver's B needs one of the right shape.
                target.zero_()
            else:
                value = torch.zeros_like(target) if value is None else value
                assert value.shape == target.shape, (
                    f"{crossing.name} must have shape {target.shape}, but has {value.shape}"
                )
                pairs.append((value, target))
        if self.digests:
            told = (*(there or There(self.examples, self.examples)), *(digests or [0] * self.examples))
            self._digest_view(buffer).copy_(torch.tensor(told, dtype=torch.int64))
        return Packed(buffer, copies.copy_to_host(pairs), body if self.apart else None)

    def unpack(self, arrived: Tensor | DeviceMessage, copies: HostCopies = CPU_COPIES) -> dict[str, Tensor]:
        """Return the tensors that have arrived, by crossing name: views into the message, or copies on a GPU."""
        buffer = arrived.body if isinstance(arrived, DeviceMessage) else arrived
        return copies.copy_to_device(
            {
                crossing.name: self._view(buffer, crossing, start)
                for crossing, start in zip(self.crossings, self.offsets_bytes, strict=False)
            }
        )

    def digests_of(self, arrived: Tensor | DeviceMessage) -> list[int]:
        """Return the digests that ``pack`` was given; all 0 if the sender reads no inputs."""
        return self._told(arrived)[len(There._fields) :]

    def there(self, arrived: Tensor | DeviceMessage) -> There:
        """Return what ``pack`` was told is there."""
        return There(*self._told(arrived)[: len(There._fields)])

    def _told(self, arrived: Tensor | DeviceMessage) -> list[int]:
        buffer = arrived.header if isinstance(arrived, DeviceMessage) else arrived
        told: list[int] = self._digest_view(buffer).tolist()
        return told

    def _shape(self, crossing: Crossing) -> torch.Size:
        return torch.Size(crossing.shape(self.examples if self.rows is None else self.rows, self.sizes))

    def _view(self, buffer: Tensor, crossing: Crossing, start: int) -> Tensor:
        shape = self._shape(crossing)
        end = start + shape.numel() * crossing.dtype.itemsize
        return buffer[start:end].view(crossing.dtype).view(shape)

    def _digest_view(self, buffer: Tensor) -> Tensor:
        start, end = self.offsets_bytes[-2:]
        # A header of its own begins with what follows the tensors in a whole message.
        start, end = (0, end - start) if self.apart else (start, end)
        return buffer[start:end].view(torch.int64)
