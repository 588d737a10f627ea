"""A checkpoint exists once its manifest does, and a manifest once all parts of a step are durable."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import assemble, make_job, make_plan, make_states, same_states, save, save_parts
from varuna.checkpoint.collector import Collector
from varuna.checkpoint.io.restore import everything, read_states
from varuna.checkpoint.manifest import (
    Manifest,
    check_compatible,
    commit,
    find_step,
    mark_damaged,
    newest_intact,
    read_manifest,
    survey,
)
from varuna.checkpoint.names import MANIFEST, checkpoint_place, parse_shard_file, split_place, step_folder
from varuna.core.errors import CheckpointError, DamagedCheckpoint, ObjectExists, ObjectMissing, StoreError
from varuna.core.model import JobFacts
from varuna.core.saved import SavedShard
from varuna.store.base import Store
from varuna.store.opening import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def shards(step: int, *, sections: int = 5, parts: int = 2, generation: int = 0) -> list[SavedShard]:
    return [
        SavedShard(
            step=step,
            generation=generation,
            section=section,
            part=part,
            parts=parts,
            file=f"section-{section:03d}.{part}of{parts}.g{generation}.00000000.safetensors",
            size_bytes=1,
        )
        for section in range(sections)
        for part in range(parts)
    ]


def collector(*generations: int) -> Collector:
    made = Collector(make_job(), run_id="run", writer="w")
    for generation in generations:
        made.begin(generation, make_plan(), first_step=0, rollback=generation == 0)
    return made


def add_all(into: Collector, found: list[SavedShard]) -> list[int]:
    """Steps that became complete, and were committed."""
    steps = []
    for shard in found:
        if (manifest := into.add(shard)) is not None:
            into.passed(manifest.step)
            steps.append(manifest.step)
    return steps


# -- collecting ----------------------------------------------------------------------------------------------


def test_a_step_is_complete_with_its_last_part_in_any_order() -> None:
    found = shards(5)
    made = collector(0)
    assert add_all(made, found[::-1][:-1]) == []
    manifest = made.add(found[0])
    assert manifest is not None
    assert list(manifest.shards) == found
    assert (manifest.step, manifest.seed, manifest.global_batch, manifest.state_digest) == (5, 1, 8, "abc")


def test_a_part_that_is_reported_twice_counts_once() -> None:
    made, found = collector(0), shards(5)
    twin = found[0].model_copy(update={"file": found[0].file.replace("00000000", "11111111")})
    assert add_all(made, [found[0], twin, *found[1:-1]]) == []
    assert add_all(made, [found[-1]]) == [5]


def test_parts_of_different_generations_make_no_checkpoint() -> None:
    made = collector(0, 1)
    assert add_all(made, [*shards(5)[:7], *shards(5, generation=1)[7:]]) == []


def test_a_survivor_may_complete_what_the_generation_before_began() -> None:
    made = collector(0)
    assert add_all(made, shards(5)[:-1]) == []
    made.begin(1, make_plan(), first_step=6, rollback=False)
    assert add_all(made, shards(5)[-1:]) == [5]


def test_a_rollback_forgets_what_was_unfinished_and_completes_the_same_step_again() -> None:
    made = collector(0)
    assert add_all(made, shards(5)) == [5]
    assert add_all(made, shards(6)[:-1]) == []
    made.begin(1, make_plan(), first_step=2, rollback=True)
    assert add_all(made, [*shards(6)[-1:], *shards(7)]) == []
    assert add_all(made, shards(5, generation=1)) == [5]


def test_a_collector_that_takes_over_drops_what_exists_and_what_began_before_it() -> None:
    made = collector()
    made.passed(5)
    made.begin(2, make_plan(), first_step=3, rollback=False)
    assert add_all(made, [*shards(5, generation=2), *shards(6, generation=1)]) == []
    assert add_all(made, shards(6, generation=2)) == [6]


def test_steps_may_overlap_and_a_skipped_one_is_forgotten() -> None:
    made = collector(0)
    assert add_all(made, [*shards(5)[:-1], *shards(6), *shards(5)[-1:]]) == [6]


def test_a_complete_step_that_could_not_be_committed_keeps_no_other_from_it() -> None:
    made = collector(0)
    assert add_all(made, shards(5)[:-1]) == []
    assert [made.add(shard) is not None for shard in shards(9)][-1], "complete, as somebody says"
    assert add_all(made, shards(5)[-1:]) == [5]
    assert add_all(made, shards(6)[:3]) == []
    assert made.passed(7) == 3


@pytest.mark.parametrize(
    "update",
    [
        {"section": 2},
        {"file": "section-001.0of2.g0.00000000.bin"},
        {"file": "../section-001.0of2.g0.00000000.safetensors"},
        {"generation": 3},
        {"part": 1},
        {"section": 9, "file": "section-009.0of2.g0.00000000.safetensors"},
        {"generation": 3, "file": "section-001.0of2.g3.00000000.safetensors"},
    ],
)
def test_a_shard_that_cannot_be_is_refused(update: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="a worker reported"):
        collector(0).add(shards(5)[2].model_copy(update=update))


@pytest.mark.parametrize("change", ["part", "order", "step"])
def test_a_manifest_that_is_not_whole_cannot_be_made(change: str) -> None:
    made = Manifest.model_validate(assemble(5, make_plan(), shards(5)).model_dump())
    found = list(made.shards)
    if change == "part":
        del found[3]
    elif change == "order":
        found.reverse()
    else:
        found[3] = found[3].model_copy(update={"step": 4})
    with pytest.raises(ValueError, match=r"are not all parts|is of step 4"):
        Manifest.model_validate({**made.model_dump(), "shards": [shard.model_dump() for shard in found]})


# -- committing ----------------------------------------------------------------------------------------------


def test_what_was_committed_is_found_again(store: Store) -> None:
    assert newest_intact(store) is None
    manifest = save(store, 10, 2, 2)
    assert newest_intact(store) == (manifest, [])
    assert read_manifest(store, 10) == manifest


def test_no_manifest_names_a_shard_that_is_not_there(store: Store) -> None:
    plan = make_plan()
    manifest = assemble(5, plan, save_parts(store, 5, plan))
    store.remove(f"{step_folder(5)}/{manifest.shards[2].file}")
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        commit(store, manifest)
    assert not survey(store)[0].is_committed


def test_saving_a_step_again_keeps_the_first_checkpoint(store: Store) -> None:
    first = save(store, 5)
    assert save(store, 5, 2, 2, generation=3) == first
    assert newest_intact(store) == (first, [])


@pytest.mark.parametrize("damage", ["shard", "manifest", "mark"])
def test_saving_a_damaged_step_again_replaces_it(store: Store, damage: str) -> None:
    first = save(store, 5)
    if damage == "shard":
        store.remove(f"{step_folder(5)}/{first.shards[0].file}")
    elif damage == "manifest":
        store.put(f"{step_folder(5)}/{MANIFEST}", b"{}")
    else:
        mark_damaged(store, 5, "a bit was flipped")
        mark_damaged(store, 5, "as somebody else found too")
    second = save(store, 5, 2, 2, generation=3)
    assert newest_intact(store) == (second, [])
    files = {*(shard.file for shard in second.shards), MANIFEST}
    assert find_step(store, 5).sizes.keys() == files  # nothing of the first is left
    assert same_states(read_states(store, second, {3: everything}), {3: make_states(5)[3]})


def test_a_checkpoint_that_may_only_not_be_read_is_not_taken_for_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(store, 5)

    def refuse(name: str) -> bytes:
        raise StoreError(f"cannot read {name}: 403 Forbidden")

    with monkeypatch.context() as rights:
        rights.setattr(store, "get", refuse)
        with pytest.raises(StoreError, match="403"):
            save(store, 5, 2, 2, generation=3)
    assert read_manifest(store, 5) == first


def test_two_who_commit_at_once_agree_on_the_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    found = save_parts(store, 5, plan)
    mine = assemble(5, plan, found)
    theirs = mine.model_copy(update={"writer": "other"})
    create = type(store).create

    def overtaken(self: Store, name: str, data: bytes) -> None:
        monkeypatch.undo()
        commit(store, theirs)
        with pytest.raises(ObjectExists):
            create(store, name, data)
        raise ObjectExists(name)

    monkeypatch.setattr(type(store), "create", overtaken)
    assert commit(store, mine) == theirs


def test_a_renamed_step_folder_is_not_trusted(store: Store) -> None:
    save(store, 5)
    store.rename_folder(step_folder(5), step_folder(7))
    with pytest.raises(DamagedCheckpoint, match="is the manifest of step 5"):
        read_manifest(store, 7)
    with pytest.raises(ObjectMissing):
        read_manifest(store, 5)


def test_checkpoints_are_ordered_by_number_and_junk_is_ignored(store: Store) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(store, step)
    for junk in ("step-5/x", "step-0000000x/y", "other/z", "step-00000011"):
        store.put(junk, b"")
    assert [folder.step for folder in survey(store)] == [100_000_000, 99_999_999, 5]


# -- names and jobs ------------------------------------------------------------------------------------------


def test_a_place_names_directory_and_step() -> None:
    for directory in ("/runs/a", "s3://bucket/a/b"):
        assert split_place(checkpoint_place(directory, 12)) == (directory, 12)
    with pytest.raises(ValueError, match="does not end with"):
        split_place("/runs/a")


@pytest.mark.parametrize("file", ["section-1.0of1.g0.00000000.safetensors", "a/b", "manifest.json"])
def test_a_file_that_is_no_shard_is_refused(file: str) -> None:
    with pytest.raises(ValueError, match="is not the file name of a shard"):
        parse_shard_file(file)


def test_the_same_state_and_samples_continue_whatever_the_graph(store: Store) -> None:
    job = make_job()
    check_compatible(save(store, 5), job)
    changed = job.model_copy(update={"model": job.model.model_copy(update={"digest": "another graph"}), "steps": 7})
    check_compatible(save(store, 6), changed)


@pytest.mark.parametrize(
    ("fact", "was", "now", "said", "unknown"),
    [
        ("samples", 40, 52, "a dataset with 40 samples, and this one has 52 samples", None),
        ("samples", 40, 0, "this one has no length", None),
        ("first_samples", "7f", "-2a", "does not begin with those that the run began with.*goes through a set", ""),
    ],
)
def test_another_dataset_is_refused_unless_it_is_accepted(
    store: Store, fact: str, was: object, now: object, said: str, unknown: object
) -> None:
    written = save(store, 5).model_copy(update={fact: was})
    job = make_job().model_copy(update={fact: now})
    with pytest.raises(CheckpointError, match=rf"{said}.*other_data=True"):
        check_compatible(written, job)
    check_compatible(written, job.model_copy(update={"takes_other_data": True}))
    check_compatible(written, job.model_copy(update={fact: was}))
    check_compatible(written.model_copy(update={fact: unknown}), job)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_job(seed=2), "seed was 1, is now 2"),
        (make_job(global_batch=16), "global batch was 8, is now 16"),
        (make_job(sections=4), "sections was 5, is now 4"),
        (make_job(state_digest="xyz"), "hash of parameters and sections was abc, is now xyz"),
    ],
)
def test_another_job_is_refused_with_both_values(store: Store, other: JobFacts, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{message}.*--new --overwrite"):
        check_compatible(save(store, 5), other)


def test_the_manager_needs_no_torch_for_checkpoints() -> None:
    code = "import sys, varuna.checkpoint.committer; sys.exit('torch' in sys.modules or 'obstore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
