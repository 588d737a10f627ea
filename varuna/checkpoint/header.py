"""The header of a safetensors file: what lies where, as JSON behind its length. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence

from varuna.checkpoint.names import ShardName
from varuna.core.saved import Piece


def header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Make length and JSON header, padded so that the tensors start at a multiple of 8.

    Args:
        tensors: name, dtype, shape and bytes of each, in file order.
        metadata: text that is stored in the file as it is.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, size_bytes in tensors:
        start, end = end, end + size_bytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_of(step: int, name: ShardName, pieces: Sequence[Piece], scalars: str) -> bytes:
    """Make the header of a part's file: a tensor that is not whole is named with the elements that are there."""
    found = [
        (piece.name, piece.dtype, piece.shape, piece.size_bytes)
        if piece.is_whole
        else (f"{piece.name}[{piece.first}:{piece.first + piece.count}]", piece.dtype, (piece.count,), piece.size_bytes)
        for piece in pieces
    ]
    part = f"{name.part} of {name.parts}"
    return header(found, {"step": str(step), "section": str(name.section), "part": part, "scalars": scalars})
