"""Pieces of a part's file, read and compared with their checksums; what a tensor is, nobody here needs to know."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from varuna.checkpoint.again import seen_twice
from varuna.checkpoint.header import header_of
from varuna.checkpoint.names import ShardName, step_folder
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.core.saved import ITEM_BYTES, STRETCH_BYTES, Piece, SavedShard
from varuna.store.base import Store

BATCH_BYTES = 16 * 2**20
"""Neighbouring pieces are read together up to this, and a longer piece in this many bytes at a time."""
_NOTHING = memoryview(b"")


class Target(NamedTuple):
    """A piece, and the memory to read it into."""

    piece: Piece
    view: memoryview
    before: int = 0
    """CRC-32 of what comes before it in the piece that it is a stretch of: its own goes on from there."""


def batches(targets: Sequence[Target], most_bytes: int = BATCH_BYTES) -> Iterator[list[Target]]:
    """Runs of pieces that lie side by side and are short together."""
    batch: list[Target] = []
    for target in targets:
        if batch:
            end = batch[-1].piece.offset + batch[-1].piece.size_bytes
            size_bytes = end - batch[0].piece.offset + target.piece.size_bytes
            if target.piece.offset != end or size_bytes > most_bytes:
                yield batch
                batch = []
        batch.append(target)
    if batch:
        yield batch


def checksums(data: memoryview) -> list[int]:
    """CRC-32 of the bytes up to each multiple of ``STRETCH_BYTES``, and of all of them: one pass, and no joining."""
    found = [0]
    for begin in range(0, max(len(data), 1), STRETCH_BYTES):
        found.append(zlib.crc32(data[begin : begin + STRETCH_BYTES], found[-1]))
    return found[1:]


def stretches(piece: Piece) -> list[Target]:
    """Parts of a piece that can each be read and compared alone; a short piece is one.

    Raises:
        DamagedCheckpoint: it has not one checksum for each.
    """
    if not piece.running:
        return [Target(piece, _NOTHING)]
    items, found = STRETCH_BYTES // ITEM_BYTES[piece.dtype], []
    begins = range(0, piece.count, items)
    if len(begins) != len(piece.running) + 1:
        raise DamagedCheckpoint(f"{piece.name} has {len(piece.running) + 1} checksums for {piece.size_bytes} bytes")
    for begin, before, crc32 in zip(begins, (0, *piece.running), (*piece.running, piece.crc32), strict=True):
        update = {
            "first": piece.first + begin,
            "count": min(items, piece.count - begin),
            "offset": piece.offset + begin * ITEM_BYTES[piece.dtype],
            "crc32": crc32,
            "running": (),
        }
        found.append(Target(piece.model_copy(update=update), _NOTHING, before))
    return found


def expected_header(shard: SavedShard) -> bytes:
    """What a shard's file begins with, by its manifest."""
    name = ShardName(shard.section, shard.part, shard.parts, shard.generation)
    return header_of(shard.step, name, shard.pieces, shard.scalars)


def check_header(store: Store, shard: SavedShard) -> None:
    """Compare a header with the manifest: restoring does not need the header, but other readers of the file do.

    Raises:
        DamagedCheckpoint: it differs, or the file is missing, also some seconds later.
        StoreError: the store cannot be read.
    """
    expected, name = expected_header(shard), f"{step_folder(shard.step)}/{shard.file}"

    def compare() -> None:
        found = bytearray(len(expected))
        store.read_into(name, 0, memoryview(found))
        if found != expected:
            raise DamagedCheckpoint(f"{store.url}/{name} is damaged: its header differs")

    _looked_at(compare)


def read(store: Store, shard: SavedShard, batch: Sequence[Target]) -> None:
    """Fill the targets and compare checksums.

    Raises:
        DamagedCheckpoint: bytes are missing or are not those that were written, also some seconds later.
        StoreError: the store cannot be read.
    """
    name = f"{step_folder(shard.step)}/{shard.file}"

    def compare() -> None:
        _fill(store, name, batch)
        wrong = _wrong(batch)
        if wrong is not None:
            where = f"bytes {wrong.offset} to {wrong.offset + wrong.size_bytes}"
            raise DamagedCheckpoint(f"{store.url}/{name} is damaged: {wrong.name} ({where}) has another checksum")

    _looked_at(compare)


def _looked_at(compare: Callable[[], None]) -> None:
    """A file that is gone is damage."""
    try:
        seen_twice(compare)
    except ObjectMissing as error:
        raise DamagedCheckpoint(str(error)) from error


def _fill(store: Store, name: str, batch: Sequence[Target]) -> None:
    begin = batch[0].piece.offset
    if len(batch) == 1:
        view = batch[0].view
        for start in range(0, len(view), BATCH_BYTES):
            store.read_into(name, begin + start, view[start : start + BATCH_BYTES])
        return
    together = memoryview(bytearray(batch[-1].piece.offset + batch[-1].piece.size_bytes - begin))
    if len(together):
        store.read_into(name, begin, together)
    for target in batch:
        start = target.piece.offset - begin
        target.view[:] = together[start : start + target.piece.size_bytes]


def _wrong(batch: Iterable[Target]) -> Piece | None:
    return next(
        (target.piece for target in batch if zlib.crc32(target.view, target.before) != target.piece.crc32), None
    )
