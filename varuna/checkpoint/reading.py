"""Pieces of a part's file, read and compared with their checksums. Pieces are bytes here, without a dtype."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from varuna.checkpoint.again import seen_twice
from varuna.checkpoint.header import header_of
from varuna.checkpoint.names import ShardName, step_folder
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.core.saved import Piece, SavedShard
from varuna.store.base import Store

BATCH_BYTES = 16 * 2**20
"""Neighbouring pieces are read together up to this, and a longer piece in this many bytes at a time."""


class Target(NamedTuple):
    """A piece, and the memory to read it into."""

    piece: Piece
    view: memoryview


def batches(targets: Sequence[Target], most_bytes: int = BATCH_BYTES) -> Iterator[list[Target]]:
    """Yield runs of pieces that lie side by side and are short together."""
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


def check_header(store: Store, shard: SavedShard) -> None:
    """Compare a header with the manifest: restoring does not need the header, but other readers of the file do.

    Raises:
        DamagedCheckpoint: it differs, or the file is missing, also some seconds later.
        StoreError: the store cannot be read.
    """
    part = ShardName(shard.section, shard.part, shard.parts, shard.generation)
    expected = header_of(shard.step, part, shard.pieces, shard.scalars)
    name = f"{step_folder(shard.step)}/{shard.file}"

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
    """Compare, twice if need be; a file that is gone is damage."""
    try:
        seen_twice(compare)
    except ObjectMissing as error:
        raise DamagedCheckpoint(str(error)) from error


def _fill(store: Store, name: str, batch: Sequence[Target]) -> None:
    begin = batch[0].piece.offset
    # It may be longer than a batch: straight into its tensor, a part at a time.
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
    return next((target.piece for target in batch if zlib.crc32(target.view) != target.piece.crc32), None)
