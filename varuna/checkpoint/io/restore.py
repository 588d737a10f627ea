"""State of some sections from a checkpoint: only the byte ranges that hold it are read, and all are checked."""

import json
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPES, SectionState
from varuna.checkpoint.manifest import Manifest, mark_damaged
from varuna.checkpoint.reading import Target, batches, check_header, read
from varuna.core.errors import DamagedCheckpoint
from varuna.core.saved import Piece, SavedShard
from varuna.process.threads import AbandoningThreadPool
from varuna.store.base import Store

_READERS = 4

Wanted = Callable[[str], bool]
"""Says by name whether a tensor, or a scalar, of a section is needed."""


def everything(name: str) -> bool:
    """Accept the whole section: a ``Wanted``."""
    return True


def read_states(store: Store, manifest: Manifest, wanted: Mapping[int, Wanted]) -> dict[int, SectionState]:
    """Read the wanted entries of each section, bit for bit.

    Raises:
        DamagedCheckpoint: bytes are missing or are not those that were written; the checkpoint is marked.
        StoreError: the store cannot be read.
    """
    states = {section: SectionState(section, {}, {}) for section in wanted}
    work: list[tuple[SavedShard, list[Target]]] = []
    for section, is_wanted in wanted.items():
        state = states[section]
        for shard in manifest.shards_of(section):
            pieces = [piece for piece in shard.pieces if is_wanted(piece.name)]
            targets = [Target(piece, _memory(state.tensors, piece)) for piece in pieces]
            work += [(shard, batch) for batch in batches(targets)]
            scalars = json.loads(shard.scalars)
            state.scalars.update({name: value for name, value in scalars.items() if is_wanted(name)})
    try:
        with AbandoningThreadPool(_READERS, "restore") as readers:
            for done in [readers.submit(read, store, shard, batch) for shard, batch in work]:
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
        check_header(store, shard)
        for piece in shard.pieces:
            read(store, shard, [Target(piece, scratch[: piece.size_bytes])])
        yield shard


def _memory(tensors: dict[str, Tensor], piece: Piece) -> memoryview:
    """Return the memory of a piece; its tensor is allocated with its first piece."""
    tensor = tensors.get(piece.name)
    if tensor is None:
        tensor = tensors[piece.name] = torch.empty(piece.shape, dtype=DTYPES[piece.dtype])
    begin = piece.first * tensor.itemsize
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.dtype is not torch.uint8 else tensor.reshape(-1)
    return flat.numpy().data[begin : begin + piece.size_bytes]
