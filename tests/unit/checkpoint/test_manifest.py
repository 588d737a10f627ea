"""A checkpoint exists once its manifest does, and is trusted once its shards are read."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from varuna.checkpoint.files import step_folder, write_atomically
from varuna.checkpoint.manifest import (
    Collector,
    Manifest,
    check_compatible,
    commit,
    manifests,
    newest_valid,
    read_manifest,
    verify_shards,
)
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard
from varuna.core.model import JobFacts, ModelFacts, SectionFacts

SECTIONS = 3


def job(*, sections: int = SECTIONS, digest: str = "abc", seed: int = 1, global_batch: int = 8) -> JobFacts:
    section = SectionFacts(
        label="h",
        forward_s=1,
        parameter_bytes=1,
        trainable_bytes=1,
        optimizer_bytes=1,
        activation_bytes=1,
        boundary_bytes=1,
    )
    model = ModelFacts(digest=digest, sections=(section,) * sections)
    return JobFacts(model=model, global_batch=global_batch, seed=seed, steps=100)


def shard(step: int, section: int, generation: int = 1, content: bytes = b"state") -> SavedShard:
    return SavedShard(
        step=step,
        section=section,
        file=f"section-{section:03d}.g{generation}.safetensors",
        size_bytes=len(content),
        sha256=sha256(content).hexdigest(),
    )


def save_shards(directory: Path, step: int, generation: int = 1) -> Manifest:
    """Write shards without committing; returns the manifest that would."""
    collector = Collector(job(), run_id="run", micro_batch=2)
    manifest = None
    for section in range(SECTIONS):
        content = f"{step}/{section}/{generation}".encode()
        saved = shard(step, section, generation, content)
        write_atomically(step_folder(directory, step) / saved.file, [content])
        manifest = collector.add(saved)
    assert manifest is not None
    return manifest


def save(directory: Path, step: int, generation: int = 1) -> Manifest:
    return commit(directory, save_shards(directory, step, generation))


def damage(directory: Path, manifest: Manifest, section: int = 1) -> Path:
    path = step_folder(directory, manifest.step) / manifest.shards[section].file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    return path


# -- collecting --------------------------------------------------------------------------------------


def test_a_step_is_complete_with_its_last_section_in_any_order() -> None:
    collector = Collector(job(), run_id="run", micro_batch=2)
    assert [collector.add(shard(10, section)) for section in (2, 0, 2)] == [None, None, None]
    manifest = collector.add(shard(10, 1))
    assert manifest == Manifest(
        run_id="run",
        step=10,
        generation=1,
        model_digest="abc",
        sections=3,
        seed=1,
        global_batch=8,
        micro_batch=2,
        shards=tuple(shard(10, section) for section in range(3)),
    )


def test_sections_of_different_generations_make_no_checkpoint() -> None:
    collector = Collector(job(), run_id="run", micro_batch=2)
    found = [collector.add(shard(10, section, generation)) for section, generation in [(0, 1), (1, 1), (2, 2), (2, 1)]]
    found += [collector.add(shard(10, 0, 2))]
    assert found == [None] * 5
    manifest = collector.add(shard(10, 1, 2))
    assert manifest is not None
    assert manifest.generation == 2


def test_steps_may_overlap_and_a_skipped_one_is_forgotten() -> None:
    collector = Collector(job(), run_id="run", micro_batch=2)
    for step, section in [(10, 0), (10, 1), (20, 0), (20, 1), (30, 0)]:
        assert collector.add(shard(step, section)) is None
    assert collector.add(shard(20, 2)) is not None
    assert collector.add(shard(10, 2)) is None
    assert collector.add(shard(20, 2)) is None
    assert list(collector._pending) == [30]


def test_a_run_that_fell_back_completes_the_same_step_again() -> None:
    collector = Collector(job(), run_id="run", micro_batch=2)
    for generation in (1, 2):
        found = [collector.add(shard(20, section, generation)) for section in range(3)]
        assert found[-1] is not None


@pytest.mark.parametrize(
    "update", [{"file": "../../etc/passwd"}, {"file": "a/section-000.g1.safetensors"}, {"section": 1}, {"section": 3}]
)
def test_a_shard_that_cannot_be_is_refused(update: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="a worker reported"):
        Collector(job(), run_id="run", micro_batch=2).add(shard(10, 0).model_copy(update=update))


# -- committing --------------------------------------------------------------------------------------


def test_what_was_committed_is_found_again(tmp_path: Path) -> None:
    manifest = save(tmp_path, 10)
    assert newest_valid(tmp_path) == (manifest, [])
    assert manifests(tmp_path) == [manifest]


def test_nothing_was_ever_committed(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") is None
    save_shards(tmp_path, 10)  # killed between the shards and the manifest
    assert newest_valid(tmp_path) is None
    assert manifests(tmp_path) == []


def test_a_kill_before_the_manifest_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    manifest = save(tmp_path, 10)
    save_shards(tmp_path, 20)
    assert newest_valid(tmp_path) == (manifest, [])


def test_saving_a_step_again_keeps_the_first_checkpoint(tmp_path: Path) -> None:
    first = save(tmp_path, 10, generation=1)
    assert save(tmp_path, 10, generation=2) == first
    assert newest_valid(tmp_path) == (first, [])
    verify_shards(tmp_path, first)


@pytest.mark.parametrize("part", ["shard", "manifest"])
def test_saving_a_damaged_step_again_replaces_it(tmp_path: Path, part: str) -> None:
    save(tmp_path, 10)
    damaged = save(tmp_path, 20)
    if part == "shard":
        damage(tmp_path, damaged)
    else:
        (step_folder(tmp_path, 20) / "manifest.json").write_text("{")
    second = save(tmp_path, 20, generation=2)
    assert newest_valid(tmp_path) == (second, [])


def test_a_manifest_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    manifest = save_shards(tmp_path, 10)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*manifest.json: Not a directory"):
        commit(tmp_path / "file", manifest)


# -- finding -----------------------------------------------------------------------------------------


def test_checkpoints_are_ordered_by_number_and_junk_is_ignored(tmp_path: Path) -> None:
    for step in (99_999_999, 5, 100_000_000):
        save(tmp_path, step)
    for name in ("step-x", "step-7", "replaced-1", "step-00000001.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000300").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    assert [m.step for m in manifests(tmp_path)] == [100_000_000, 99_999_999, 5]


def test_a_damaged_checkpoint_falls_back_with_a_warning(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    path = damage(tmp_path, save(tmp_path, 20))
    found = newest_valid(tmp_path)
    assert found is not None
    assert found[0] == good
    [warning] = found[1]
    assert f"step 20 cannot be used: {path} is damaged: expected SHA-256" in warning


def test_a_missing_shard_falls_back_with_a_warning(tmp_path: Path) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    (step_folder(tmp_path, 20) / newest.shards[2].file).unlink()
    found = newest_valid(tmp_path)
    assert found is not None
    assert found[0].step == 10
    assert "section-002.g1.safetensors: No such file" in found[1][0]


def test_when_nothing_is_intact_the_run_does_not_start_from_zero(tmp_path: Path) -> None:
    paths = [damage(tmp_path, save(tmp_path, step)) for step in (10, 20)]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact") as caught:
        newest_valid(tmp_path)
    for expected in (*map(str, paths), "Restore the named files", "--new --overwrite"):
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "\x00\xff",
        lambda text: json.dumps({**json.loads(text), "later": 1}),
        lambda text: json.dumps({**json.loads(text), "version": 2}),
        lambda text: json.dumps({**json.loads(text), "step": 20}),
        lambda text: json.dumps({**json.loads(text), "sections": 4}),
        lambda text: json.dumps({**json.loads(text), "generation": 9}),
        lambda text: text.replace("section-001", "../step-00000010/section-001"),
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path: Path, edit: object) -> None:
    save(tmp_path, 10)
    path = step_folder(tmp_path, 10) / "manifest.json"
    path.write_text(edit(path.read_text()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=str(path)):
        newest_valid(tmp_path)
    good = save(tmp_path, 5)
    assert manifests(tmp_path) == [good]


def test_a_renamed_step_folder_is_not_trusted(tmp_path: Path) -> None:
    save(tmp_path, 10)
    step_folder(tmp_path, 10).rename(step_folder(tmp_path, 12))
    with pytest.raises(CheckpointError, match="manifest of step 10: the folder was renamed"):
        read_manifest(step_folder(tmp_path, 12))


def test_a_directory_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot read .*file: Not a directory"):
        newest_valid(tmp_path / "file")


# -- continuing --------------------------------------------------------------------------------------


def test_the_same_job_continues(tmp_path: Path) -> None:
    check_compatible(save(tmp_path, 10), job())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (job(digest="xyz"), "model digest abc there, xyz now"),
        (job(sections=4), "sections 3 there, 4 now"),
        (job(seed=2), "seed 1 there, 2 now"),
        (job(global_batch=16, seed=0), "seed 1 there, 0 now; global batch 8 there, 16 now"),
    ],
)
def test_another_job_is_refused_with_both_values(tmp_path: Path, other: JobFacts, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{message}.*--new --overwrite"):
        check_compatible(save(tmp_path, 10), other)


def test_the_manager_needs_no_torch_for_checkpoints() -> None:
    code = "import sys, varuna.checkpoint.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
