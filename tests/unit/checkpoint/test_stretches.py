"""Of a piece that is too long to be read as a whole, a stretch is read and compared."""

import random
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.checkpoint.saves import assemble, make_plan, make_states, save_parts
from varuna.checkpoint import reading
from varuna.checkpoint.io.restore import verify
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.manifest import commit
from varuna.checkpoint.names import step_folder
from varuna.checkpoint.reading import checksums, stretches
from varuna.checkpoint.verifier import ReadBack, read_back
from varuna.core.errors import DamagedCheckpoint
from varuna.core.saved import Piece
from varuna.store.base import Store
from varuna.store.opening import open_store

STRETCH_BYTES = 256


def long_states() -> dict[int, SectionState]:
    """Two long tensors whose elements differ in size, among short ones."""
    draw = torch.Generator().manual_seed(0)
    states = make_states()
    states[0].tensors["parameters/h.0.long"] = torch.randn(41, 25, generator=draw)
    states[2].tensors["optimizer/h.2.long/exp_avg"] = torch.randn(700, generator=draw).bfloat16()
    return states


def change(store: Store, name: str, at: int) -> None:
    data = bytearray(store.get(name))
    data[at] ^= 1
    store.put(name, bytes(data))


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_wrong_byte_in_a_long_piece_is_found_by_reading_its_stretch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    monkeypatch.setattr(reading, "STRETCH_BYTES", STRETCH_BYTES)
    store, plan = open_store(tmp_path), make_plan(1, replicas)
    manifest = commit(store, assemble(3, plan, save_parts(store, 3, plan, states=long_states())))
    every = [(shard, piece) for shard in manifest.shards for piece in shard.pieces]
    shard, longest = max(every, key=lambda each: each[1].size_bytes)
    assert len(longest.running) == -(-longest.size_bytes // STRETCH_BYTES) - 1 > 3
    assert read_back(store, manifest, batch_bytes=STRETCH_BYTES) == ReadBack(
        3, manifest.size_bytes, manifest.size_bytes
    )

    name = f"{step_folder(3)}/{shard.file}"
    whole = store.get(name)
    for at in (0, STRETCH_BYTES - 1, STRETCH_BYTES, longest.size_bytes // 2, longest.size_bytes - 1):
        change(store, name, longest.offset + at)
        begin = longest.offset + at // STRETCH_BYTES * STRETCH_BYTES
        end = min(begin + STRETCH_BYTES, longest.offset + longest.size_bytes)
        bound = longest.size_bytes // 2  # so it never fits as a whole
        found = [
            read_back(store, manifest, most_bytes=bound, batch_bytes=STRETCH_BYTES, draw=random.Random(seed))
            for seed in range(30)
        ]
        damage = {each.damage for each in found if each is not None}
        assert len(damage) == 2  # chance comes to it, or does not
        assert f"{longest.name} (bytes {begin} to {end}) has another checksum" in max(damage)
        with pytest.raises(DamagedCheckpoint):  # who reads the whole piece sees it too
            list(verify(store, manifest))
        store.put(name, whole)
    assert len(list(verify(store, manifest))) == len(manifest.shards)


@given(st.binary(max_size=100), st.integers(1, 40))
def test_the_checksum_of_a_stretch_goes_on_from_the_one_before(data: bytes, stretch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "STRETCH_BYTES", stretch)
        *running, whole = checksums(memoryview(data))
        piece = Piece(name="x", dtype="U8", shape=(len(data),), first=0, count=len(data), offset=7, crc32=whole)
        found = stretches(piece.model_copy(update={"running": tuple(running)}))
    assert whole == zlib.crc32(data)
    assert [target.piece.offset for target in found] == [7 + begin for begin in range(0, max(len(data), 1), stretch)]
    assert sum(target.piece.size_bytes for target in found) == len(data)
    for target in found:
        begin = target.piece.offset - 7
        assert zlib.crc32(data[begin : begin + target.piece.size_bytes], target.before) == target.piece.crc32


def test_a_piece_of_40_mib_has_three_stretches(tmp_path: Path) -> None:
    states = {0: SectionState(0, {"parameters/w": torch.zeros(10 * 2**20)}, {})}  # 40 MiB
    store, plan = open_store(tmp_path), make_plan(sections=1)
    (shard,) = save_parts(store, 3, plan, states=states)
    (piece,) = shard.pieces
    assert [target.piece.size_bytes >> 20 for target in stretches(piece)] == [16, 16, 8]
    assert piece.crc32 == zlib.crc32(bytes(40 * 2**20))
