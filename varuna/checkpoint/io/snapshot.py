"""Copies of what a rank saves, in one buffer of host memory that is allocated and touched before it is needed.

The training thread only copies; the writer reads from the buffer, so there is never a second copy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPE_NAMES, SectionState, scalars_as_json
from varuna.checkpoint.names import ShardName
from varuna.checkpoint.pieces import SMALLEST_PART_BYTES, TensorFacts, count_parts, divide, understudy_of, writer_of
from varuna.core.errors import CheckpointError
from varuna.core.saved import Piece

_ALIGNMENT = 64


Room = Callable[[int], Tensor]
"""Allocates that many bytes of host memory."""


class SectionPart(NamedTuple):
    """A part of a section that this rank copies, and which replica should write it."""

    name: ShardName
    writer: int
    pieces: tuple[Piece, ...]
    """offsets count from the part's first byte"""
    scalars: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size_bytes for piece in self.pieces)


class Copied(NamedTuple):
    """A part of a section, and the region of the buffer that its bytes are copied into."""

    part: SectionPart
    data: memoryview


def parts_of(
    states: Sequence[SectionState],
    *,
    replica: int,
    holders: Mapping[int, Sequence[int]],
    generation: int,
    smallest_bytes: int = SMALLEST_PART_BYTES,
) -> list[SectionPart]:
    """Find the parts of its sections that a replica copies: those that it writes, and those that it is understudy for.

    Args:
        states: of sections that ``replica`` holds.
        replica: the one that copies.
        holders: by section: all replicas of the stage, or those that have its optimizer state.
        generation: the one in which this happens.
        smallest_bytes: of a part, if there are to be several.

    Raises:
        CheckpointError: a tensor's dtype has no place in safetensors, or a scalar none in JSON.
    """
    found: list[SectionPart] = []
    for state in states:
        tensors = [_facts(state, name, value) for name, value in state.tensors.items()]
        among = holders[state.section]
        count = count_parts(sum(tensor.size_bytes for tensor in tensors), len(among), smallest_bytes)
        scalars = scalars_as_json(state)
        for number, pieces in enumerate(divide(tensors, count)):
            writer = writer_of(state.section, number, among)
            if replica in (writer, understudy_of(state.section, number, among)):
                name = ShardName(state.section, number, count, generation)
                found.append(SectionPart(name, writer, tuple(pieces), scalars if number == 0 else "{}"))
    return sorted(found, key=lambda part: part.writer != replica)  # what this replica writes comes first


def _facts(state: SectionState, name: str, value: Tensor) -> TensorFacts:
    if value.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} of section {state.section} is {value.dtype}, which safetensors does not support")
    return TensorFacts(name, DTYPE_NAMES[value.dtype], tuple(value.shape))


class SnapshotBuffer:
    """Host memory for one snapshot."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        """Bytes that the buffer can hold."""
        return self._buffer.numel()

    def reserve(self, size_bytes: int, room: Room) -> None:
        """Allocate and touch, unless it is large enough; what it held is lost."""
        if size_bytes > self.size_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never two of them
            self._buffer = room(size_bytes).fill_(0)

    def place(
        self, parts: Sequence[SectionPart], states: Mapping[int, SectionState], room: Room
    ) -> tuple[list[Copied], list[tuple[Tensor, Tensor]]]:
        """Give each part a place, and list what is to be copied: values of the states, each with its host memory."""
        self.reserve(needed_bytes(parts), room)
        copied, start = [], 0
        pairs: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            end = start + part.size_bytes
            region = self._buffer[start:end]
            tensors = states[part.name.section].tensors
            for piece in part.pieces:
                source = tensors[piece.name].detach().resolve_conj().resolve_neg().reshape(-1)
                run = source[piece.first : piece.first + piece.count]
                target = region[piece.offset : piece.offset + piece.size_bytes]
                pairs.append((run, target.view(run.dtype)))
            copied.append(Copied(part, region.numpy().data))
            start = end + -end % _ALIGNMENT
        return copied, pairs


def needed_bytes(parts: Sequence[SectionPart]) -> int:
    """Return the bytes of a buffer that holds these parts."""
    return sum(part.size_bytes + -part.size_bytes % _ALIGNMENT for part in parts)
