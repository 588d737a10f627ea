"""Any P x D reads what any P x D saved, bit for bit, by the bytes it needs; what is damaged is never loaded."""

import itertools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.depth import of_depth
from tests.unit.checkpoint.saves import SECTIONS, assemble, make_plan, make_states, same_states, save, save_parts
from varuna.checkpoint.io.restore import everything, read_states, verify
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.manifest import Manifest, commit, newest_intact, read_manifest, survey
from varuna.checkpoint.names import MANIFEST, step_folder
from varuna.core.errors import CheckpointError, DamagedCheckpoint
from varuna.store.base import Store
from varuna.store.opening import open_store
from varuna.testing.stores import HookedStore

SHAPES = list(itertools.product(range(1, 5), range(1, 5)))


@pytest.mark.parametrize(("stages", "replicas"), of_depth(SHAPES, {(1, 1), (1, 3), (3, 1), (2, 2), (4, 4)}))
def test_every_shape_reads_what_any_shape_saved(stages: int, replicas: int) -> None:
    store = open_store(f"memory://{stages}x{replicas}")
    manifest, states = save(store, 7, stages, replicas), make_states(7)
    assert {shard.parts for shard in manifest.shards} >= {replicas}
    for new_stages, new_replicas in SHAPES:
        plan = make_plan(new_stages, new_replicas)
        for rank in range(plan.workers):
            wanted = plan.first.sections_of(plan.place_of(rank).stage)
            if rank < plan.stages:  # replicas ask for the same
                read = read_states(store, manifest, dict.fromkeys(wanted, everything))
                assert same_states(read, {section: states[section] for section in wanted})


def big_state() -> SectionState:
    return SectionState(
        0,
        {"parameters/w": torch.randn(3_000_000), "parameters/v": torch.randn(1000, 70), "optimizer/w/m": torch.ones(9)},
    )


class CountingStore(HookedStore):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        self.read_bytes += len(view)
        super().read_into(name, start, view)


class OnceWrongStore(HookedStore):
    """The first transfer arrives with a bit that is not the store's."""

    is_wrong = True

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        super().read_into(name, start, view)
        view[0] ^= self.is_wrong
        self.is_wrong = False


def test_a_rank_reads_no_more_bytes_than_its_sections_have(tmp_path: Path) -> None:
    store = CountingStore(open_store(tmp_path))
    states = make_states(3) | {0: big_state()}
    plan = make_plan(2, 3)
    manifest = commit(store, assemble(3, plan, save_parts(store, 3, plan, states=states)))
    for stage in range(2):
        store.read_bytes = 0
        read = read_states(store, manifest, dict.fromkeys(plan.first.sections_of(stage), everything))
        own_bytes = sum(value.nbytes for state in read.values() for value in state.tensors.values())
        assert own_bytes <= store.read_bytes <= 1.05 * own_bytes
    store.read_bytes = 0
    part = read_states(store, manifest, {0: lambda name: name == "parameters/v"})
    assert store.read_bytes == 280_000
    assert torch.equal(part[0].tensors["parameters/v"], states[0].tensors["parameters/v"])
    assert part[0].tensors.keys() == {"parameters/v"}


def test_a_shard_is_a_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    [shard] = [shard for shard in save_parts(store, 2, make_plan()) if shard.section == 2]
    read = safetensors.torch.load_file(tmp_path / step_folder(2) / shard.file)
    assert {name: torch.equal(value, read[name]) for name, value in make_states(2)[2].tensors.items()} == dict.fromkeys(
        read, True
    )
    halves = [shard for shard in save_parts(store, 3, make_plan(1, 2)) if shard.section == 2]
    names = [name for half in halves for name in safetensors.torch.load_file(tmp_path / step_folder(3) / half.file)]
    assert any(name.endswith("]") for name in names)


# -- damage --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def damage(store: Store, manifest: Manifest, kind: str, section: int = 2) -> str:
    shard = manifest.shards_of(section)[0]
    path = Path(store.url) / step_folder(manifest.step) / shard.file
    data = bytearray(path.read_bytes())
    match kind:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(data[:-3])
        case "manifest missing":
            (path.parent / "manifest.json").unlink()
        case "manifest torn" | "manifest flipped":
            manifest_path = path.parent / "manifest.json"
            text = manifest_path.read_bytes()
            flipped = text.replace(b'"seed": 1', b'"seed": 3')
            manifest_path.write_bytes(text[:100] if kind == "manifest torn" else flipped)
        case _:
            data[shard.pieces[0].offset + int(kind)] ^= 4
            path.write_bytes(data)
    return shard.file


@pytest.mark.parametrize("kind", ["missing", "truncated", "manifest missing", "manifest torn", "manifest flipped"])
def test_what_a_listing_shows_is_passed_over_with_a_warning(store: Store, kind: str) -> None:
    save(store, 4)
    file = damage(store, save(store, 8, 2, 2), kind)
    found = newest_intact(store)
    assert found is not None
    assert found[0].step == 4
    if kind == "manifest missing":
        assert found[1] == []  # it is not a checkpoint at all
    else:
        assert "the checkpoint of step 8 cannot be used" in found[1][0]
        assert ("manifest.json" if "manifest" in kind else file) in found[1][0]


@pytest.mark.parametrize("at", [0, 17, 63])
def test_a_flipped_bit_is_found_by_its_reader_and_nobody_chooses_the_checkpoint_again(store: Store, at: int) -> None:
    save(store, 4)
    manifest = save(store, 8, 2, 2)
    file = damage(store, manifest, str(at))
    with pytest.raises(DamagedCheckpoint, match=rf"{file} is damaged: .*h\.2.* has another checksum"):
        read_states(store, manifest, {2: everything})
    found = newest_intact(store)
    assert found is not None
    assert found[0].step == 4
    assert "it was marked" in found[1][0]
    assert file in found[1][0]
    assert same_states(read_states(store, found[0], {2: everything}), {2: make_states(4)[2]})


def test_a_transfer_that_goes_wrong_once_is_no_damage(store: Store) -> None:
    manifest, hooked = save(store, 4), OnceWrongStore(store)
    states = read_states(hooked, manifest, dict.fromkeys(range(SECTIONS), everything))
    assert not hooked.is_wrong
    assert same_states(states, make_states(4))
    assert not survey(store)[0].is_damaged


def test_when_nothing_is_intact_the_run_does_not_start_from_zero(store: Store) -> None:
    damage(store, save(store, 4), "missing")
    damage(store, save(store, 8), "truncated")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint in .* is intact.*step 8.*step 4.*--new --overwrite"):
        newest_intact(store)


def resealed(store: Store, manifest: Manifest, change: Callable[[Any], object]) -> None:
    """Change a manifest by ``change``, and give it a checksum that is right."""
    content = json.loads(manifest.model_dump_json())
    change(content)
    body = json.dumps(content).encode()
    store.put(f"{step_folder(manifest.step)}/{MANIFEST}", b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body))


def piece_of(content: Any) -> Any:
    """The first piece of the last section."""
    return content["shards"][-2]["pieces"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content["shards"][-2]["pieces"].pop(), "does not cover section 4"),
        (lambda content: content["shards"][-1]["pieces"].pop(0), "does not cover section 4"),
        (lambda content: piece_of(content).update(dtype="F7"), "unknown dtype"),
        (lambda content: piece_of(content).update(shape=[-4, -4]), "cannot have the shape"),
        (lambda content: piece_of(content).update(shape=[2**40, 2**40]), "cannot have the shape"),
        (lambda content: piece_of(content).update(shape=[0, 2**63]), "cannot have the shape"),
        (lambda content: piece_of(content).update(shape=[2**40], count=2**40), "are not within its"),
        (lambda content: piece_of(content).update(first=10**6), "elements"),
        (lambda content: piece_of(content).update(offset=10**30), "are not within its"),
        (lambda content: content["shards"][-2].update(scalars="[" * 10**5), "not a JSON object"),
        (lambda content: content["shards"][-2].update(scalars='{"a":' * 900 + "1" + "}" * 900), "not a JSON object"),
        (lambda content: content["shards"][-2].update(scalars="[]"), "not a JSON object"),
        (lambda content: content.update(sections=10**12), "are not all parts"),
        (lambda content: [shard.update(parts=10**12) for shard in content["shards"]], "are not all parts"),
    ],
)
def test_a_manifest_that_cannot_be_is_damage_whatever_its_checksum_and_an_older_one_counts(
    store: Store, change: Callable[[Any], object], said: str
) -> None:
    older = save(store, 2)
    resealed(store, save(store, 4, 1, 2), change)
    found = newest_intact(store)
    assert found is not None
    assert found[0] == older
    assert said in found[1][0]


def test_a_manifest_with_a_number_of_any_length_is_damage(store: Store) -> None:
    save(store, 4)
    store.put(f"{step_folder(4)}/{MANIFEST}", b'{"crc32": %s, "manifest": {}}\n' % (b"9" * 5000))
    with pytest.raises(DamagedCheckpoint, match="its checksum does not match"):
        read_manifest(store, 4)


def test_verifying_reads_headers_too(store: Store) -> None:
    manifest = save(store, 4, 2, 2)
    assert list(verify(store, manifest)) == list(manifest.shards)
    path = Path(store.url) / step_folder(4) / manifest.shards[3].file
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="its header differs"):
        list(verify(store, manifest))
