"""The division of a section among its holders: equal bytes, cut anywhere in the sequence of its tensors."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from varuna.core.saved import ITEM_BYTES, Piece

SMALLEST_PART_BYTES = 4 * 2**20
"""Smallest part of a section; a smaller file costs more than it saves."""


class TensorFacts(NamedTuple):
    """A tensor without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def count_parts(size_bytes: int, replicas: int, smallest_bytes: int = SMALLEST_PART_BYTES) -> int:
    """Return the number of parts for a section of ``size_bytes`` with ``replicas`` holders: 1 to ``replicas``."""
    return max(1, min(replicas, -(-size_bytes // smallest_bytes)))


def divide(tensors: Iterable[TensorFacts], parts: int) -> list[list[Piece]]:
    """Cut tensors into pieces of each part, in file order; offsets count from the part's first byte.

    All holders of a section get the same answer. Parts differ by less than two elements. Widest dtype first keeps
    every piece aligned within its part.
    """
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    total_bytes = sum(tensor.size_bytes for tensor in ordered)
    # Multiplied before it is divided: rounding does not add up over the parts.
    ends = [total_bytes * (part + 1) // parts for part in range(parts)]
    divided: list[list[Piece]] = [[] for _ in range(parts)]
    part, position, begin = 0, 0, 0  # bytes of the sequence: where we are, and where the part began
    for tensor in ordered:
        first, elements, item_bytes = 0, prod(tensor.shape), ITEM_BYTES[tensor.dtype]
        while first < elements or elements == 0:
            # Whole elements only; what does not fit goes to the next part, and the last one takes all that is left.
            room = elements if part == parts - 1 else max(0, ends[part] - position) // item_bytes
            count = min(elements - first, room)
            if count or elements == 0:
                divided[part].append(
                    Piece(
                        name=tensor.name,
                        dtype=tensor.dtype,
                        shape=tensor.shape,
                        first=first,
                        count=count,
                        offset=position - begin,
                    )
                )
            if elements == 0:
                break
            first += count
            position += count * item_bytes
            # The tensor continues in the next part, whose file begins with it.
            if first < elements:
                part, begin = part + 1, position
    return divided


def writer_of(section: int, part: int, holders: Sequence[int]) -> int:
    """Return the replica, of those that hold a section, that writes a part.

    Sections begin with different ones, so that small ones spread.
    """
    return holders[(section + part) % len(holders)]


def understudy_of(section: int, part: int, holders: Sequence[int]) -> int:
    """Return the replica that copies a part, too, and writes it if the writer dies; the writer itself if alone."""
    return holders[(section + part + 1) % len(holders)]
