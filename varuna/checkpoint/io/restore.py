"""State of some sections from a checkpoint: only the byte ranges that hold it are read, and all are checked."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPE_NAMES, SectionState, header_of
from varuna.checkpoint.manifest import Manifest, mark_damaged
from varuna.checkpoint.names import ShardName, step_folder
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.core.saved import Piece, SavedShard
from varuna.process.threads import Crew
from varuna.store.base import Store

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_BATCH_BYTES = 16 * 2**20
"""Neighbouring pieces are read together up to this, and a longer piece in this many bytes at a time."""
_READERS = 4

Wanted = Callable[[str], bool]
"""Says by name whether a tensor, or a scalar, of a section is needed."""


class _Target(NamedTuple):
    """A piece, and the memory to read it into."""

    piece: Piece
    view: memoryview


def everything(name: str) -> bool:
    """A ``Wanted`` that accepts the whole section."""
    return True


def read_states(store: Store, manifest: Manifest, wanted: Mapping[int, Wanted]) -> dict[int, SectionState]:
    """Read the wanted entries of each section, bit for bit.

    Raises:
        DamagedCheckpoint: bytes are missing or are not those that were written; the checkpoint is marked.
        StoreError: the store cannot be read.
    """
    states = {section: SectionState(section, {}, {}) for section in wanted}
    batches: list[tuple[SavedShard, list[_Target]]] = []
    for section, is_wanted in wanted.items():
        state = states[section]
        for shard in manifest.shards_of(section):
            pieces = [piece for piece in shard.pieces if is_wanted(piece.name)]
            targets = [_Target(piece, _memory(state.tensors, piece)) for piece in pieces]
            batches += [(shard, batch) for batch in _batches(targets)]
            scalars = json.loads(shard.scalars)
            state.scalars.update({name: value for name, value in scalars.items() if is_wanted(name)})
        _check_covered(store, manifest, section, is_wanted)
    try:
        with Crew(_READERS, "restore") as readers:
            for done in [readers.submit(_read, store, shard, batch) for shard, batch in batches]:
                done.result()
    except DamagedCheckpoint as error:
        mark_damaged(store, manifest.step, str(error))
        raise
    return states


def verify(store: Store, manifest: Manifest) -> Iterator[SavedShard]:
    """Read every byte of every shard and check it; yields each shard that is intact.

    Raises:
        DamagedCheckpoint: the first that is not; it is not marked.
        StoreError: the store cannot be read.
    """
    for shard in manifest.shards:
        longest = max((piece.size_bytes for piece in shard.pieces), default=0)
        scratch = memoryview(bytearray(longest))
        _check_header(store, shard)
        for piece in shard.pieces:
            _read(store, shard, [_Target(piece, scratch[: piece.size_bytes])])
        yield shard


def _check_header(store: Store, shard: SavedShard) -> None:
    """Compare a header with the manifest: restoring does not need the header, but other readers of the file do."""
    name = ShardName(shard.section, shard.part, shard.parts, shard.generation)
    expected = header_of(shard.step, name, shard.pieces, shard.scalars)
    found = bytearray(len(expected))
    try:
        store.read_into(f"{step_folder(shard.step)}/{shard.file}", 0, memoryview(found))
    except ObjectMissing as error:
        raise DamagedCheckpoint(str(error)) from error
    if found != expected:
        raise DamagedCheckpoint(f"{store.url}/{step_folder(shard.step)}/{shard.file} is damaged: its header differs")


def _check_covered(store: Store, manifest: Manifest, section: int, is_wanted: Wanted) -> None:
    """Check that one piece covers each element of each tensor; otherwise memory would stay uninitialised."""
    reached: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in (piece for shard in manifest.shards_of(section) for piece in shard.pieces if is_wanted(piece.name)):
        if piece.first != reached.get(piece.name, 0) or shapes.setdefault(piece.name, piece.shape) != piece.shape:
            break
        reached[piece.name] = piece.first + piece.count
    else:
        if all(reached[name] == prod(shape) for name, shape in shapes.items()):
            return
    raise DamagedCheckpoint(f"{store.url}: the manifest of step {manifest.step} does not cover section {section}")


def _memory(tensors: dict[str, Tensor], piece: Piece) -> memoryview:
    """Memory of a piece; its tensor is allocated with its first piece."""
    tensor = tensors.get(piece.name)
    if tensor is None:
        tensor = tensors[piece.name] = torch.empty(piece.shape, dtype=_DTYPES[piece.dtype])
    begin = piece.first * tensor.itemsize
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.dtype is not torch.uint8 else tensor.reshape(-1)
    return flat.numpy().data[begin : begin + piece.size_bytes]


def _batches(targets: Sequence[_Target]) -> Iterator[list[_Target]]:
    """Runs of pieces that lie side by side and are short together."""
    batch: list[_Target] = []
    for target in targets:
        if batch:
            end = batch[-1].piece.offset + batch[-1].piece.size_bytes
            size_bytes = end - batch[0].piece.offset + target.piece.size_bytes
            if target.piece.offset != end or size_bytes > _BATCH_BYTES:
                yield batch
                batch = []
        batch.append(target)
    if batch:
        yield batch


def _read(store: Store, shard: SavedShard, batch: Sequence[_Target]) -> None:
    """Fill the targets and compare checksums; on a mismatch read once more, since the transfer may be at fault."""
    name = f"{step_folder(shard.step)}/{shard.file}"
    for attempt in range(2):
        try:
            _fill(store, name, batch)
        except ObjectMissing as error:
            raise DamagedCheckpoint(str(error)) from error
        wrong = _wrong(batch)
        if wrong is None:
            return
        if attempt:
            where = f"bytes {wrong.offset} to {wrong.offset + wrong.size_bytes}"
            raise DamagedCheckpoint(f"{store.url}/{name} is damaged: {wrong.name} ({where}) has another checksum")


def _fill(store: Store, name: str, batch: Sequence[_Target]) -> None:
    begin = batch[0].piece.offset
    if len(batch) == 1:
        view = batch[0].view
        for start in range(0, len(view), _BATCH_BYTES):
            store.read_into(name, begin + start, view[start : start + _BATCH_BYTES])
        return
    together = memoryview(bytearray(batch[-1].piece.offset + batch[-1].piece.size_bytes - begin))
    if len(together):
        store.read_into(name, begin, together)
    for target in batch:
        start = target.piece.offset - begin
        target.view[:] = together[start : start + target.piece.size_bytes]


def _wrong(batch: Iterable[_Target]) -> Piece | None:
    return next((target.piece for target in batch if zlib.crc32(target.view) != target.piece.crc32), None)
