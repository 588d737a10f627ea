"""The layout of a stage's state between ranks: a header, then the bytes of all tensors as one body, in equal parts.

Nothing is copied as a whole: a part is cut out of the tensors as they are, and put into new ones at the other end.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Self

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPE_NAMES, DTYPES, JSON, SectionState
from varuna.core.errors import CheckpointError
from varuna.engine.device.host_copies import CPU_COPIES, DONE, HostCopies, Ready

_ALIGNMENT_BYTES = 64


class TensorPlace(NamedTuple):
    """A tensor of a section's state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    """of its bytes, within those of its section"""


class SectionLayout(NamedTuple):
    """The state of one section, without its tensors' values."""

    section: int
    size_bytes: int
    entries: tuple[TensorPlace, ...]
    scalars: dict[str, JSON]

    @classmethod
    def of(cls, state: SectionState) -> Self:
        """Lay a state out.

        Raises:
            CheckpointError: a tensor's dtype has no name.
        """
        entries, end = [], 0
        for name, value in state.tensors.items():
            if value.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name} of section {state.section} is {value.dtype}, which cannot be copied")
            entries.append(TensorPlace(name, DTYPE_NAMES[value.dtype], tuple(value.shape), end))
            # Aligned, since tensors are used where they lie in the body (``state_in``).
            end = -(-(end + value.nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(state.section, end, tuple(entries), dict(state.scalars))

    def state_in(self, memory: Tensor) -> SectionState:
        """Make the state whose bytes are in ``memory``, of views of it.

        Single numbers are copies: optimizers keep them on the host, where one of them would hold all the memory.
        """
        tensors = {}
        for name, dtype_name, shape, first in self.entries:
            dtype, count = DTYPES[dtype_name], torch.Size(shape).numel()
            value = memory[first : first + count * dtype.itemsize].view(dtype).view(shape)
            tensors[name] = value if shape else value.clone()
        return SectionState(self.section, tensors, dict(self.scalars))


def as_bytes(layouts: Sequence[SectionLayout]) -> bytes:
    """Encode layouts: the header of a copy."""
    return json.dumps([layout._asdict() for layout in layouts]).encode()


def from_bytes(header: bytes) -> tuple[SectionLayout, ...]:
    """Decode what ``as_bytes`` made."""
    return tuple(
        SectionLayout(
            each["section"],
            each["size_bytes"],
            tuple(TensorPlace(name, dtype, tuple(shape), first) for name, dtype, shape, first in each["entries"]),
            each["scalars"],
        )
        for each in json.loads(header)
    )


class Body:
    """Bytes of several sections, one after another, which are read or written in parts."""

    def __init__(self, pieces: Sequence[tuple[int, Tensor]], size_bytes: int) -> None:
        """Begin with flat tensors of bytes, and where each begins in the body."""
        self._pieces = [(start, piece) for start, piece in pieces if piece.numel()]
        self._starts, self.size_bytes = [start for start, _ in self._pieces], size_bytes

    @classmethod
    def of_states(cls, layouts: Sequence[SectionLayout], states: Mapping[int, SectionState]) -> Self:
        """Make the body of states as they are; what is not contiguous is copied."""
        pieces, start = [], 0
        for layout in layouts:
            for entry in layout.entries:
                value = states[layout.section].tensors[entry.name].detach().resolve_conj().resolve_neg()
                pieces.append((start + entry.first, value.contiguous().view(-1).view(torch.uint8)))
            start += layout.size_bytes
        return cls(pieces, start)

    @classmethod
    def of_memory(cls, memories: Sequence[Tensor]) -> Self:
        """Make the body that is in the memory of each section."""
        pieces, start = [], 0
        for memory in memories:
            pieces.append((start, memory))
            start += memory.numel()
        return cls(pieces, start)

    def read(self, first: int, part: Tensor, copies: HostCopies = CPU_COPIES, after: Ready = DONE) -> None:
        """Copy the bytes from ``first`` on into ``part``; what is between tensors, or beyond the end, stays.

        Args:
            first: byte of the body.
            part: host memory.
            copies: from where the body is.
            after: a point of the device at which the body is as it should be.
        """
        copies.copy_to_host(self._overlaps(first, part), after).wait()

    def begin_copy(self, memory: Tensor, copies: HostCopies) -> Ready:
        """Begin to copy all bytes, as they are now, into host memory; they may change once the result is done."""
        return copies.copy_to_host(self._overlaps(0, memory))

    def write(self, first: int, part: Tensor) -> None:
        """Copy ``part`` over the bytes from ``first`` on: the inverse of ``read``."""
        for mine, other in self._overlaps(first, part):
            mine.copy_(other)

    def _overlaps(self, first: int, part: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Find the pieces that a part overlaps, and where they are in the part."""
        end, found = first + part.numel(), []
        # The last piece that begins at or before ``first``: those before it have ended.
        nearest = max(0, bisect_right(self._starts, first) - 1)
        for start, piece in islice(self._pieces, nearest, None):
            if start >= end:
                break
            low, high = max(first, start), min(end, start + piece.numel())
            if low < high:
                found.append((piece[low - start : high - start], part[low - first : high - first]))
        return found
