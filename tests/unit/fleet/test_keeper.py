import hashlib
from pathlib import Path

import pytest

from tests.unit.fleet.support import make_job
from varuna.checkpoint.files import step_folder
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard
from varuna.core.model import JobFacts
from varuna.fleet.keeper import CheckpointKeeper


def job_in(folder: Path) -> JobFacts:
    return make_job(sections=2).model_copy(update={"checkpoint_dir": str(folder)})


def save(folder: Path, step: int, section: int, generation: int = 0) -> SavedShard:
    name, content = f"section-{section:03d}.g{generation}.safetensors", b"state"
    path = step_folder(folder, step) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return SavedShard(
        step=step, section=section, file=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


def keeper(warnings: list[str], *, new: bool = False, overwrite: bool = False) -> CheckpointKeeper:
    return CheckpointKeeper(new=new, overwrite=overwrite, warn=warnings.append)


def test_a_job_without_a_directory_has_no_checkpoints() -> None:
    assert keeper([]).newest(make_job()) is None


def test_a_checkpoint_is_found_once_all_its_shards_are_in(tmp_path: Path) -> None:
    warnings: list[str] = []
    keep, job = keeper(warnings), job_in(tmp_path)
    assert keep.newest(job) is None
    keep.begin(job, 4)
    keep.collect(save(tmp_path, 5, 0))
    assert keep.newest(job) is None
    keep.collect(save(tmp_path, 5, 1))
    found = keep.newest(job)
    assert found == (str(step_folder(tmp_path, 5)), 5, 4)
    assert warnings == []


def test_a_checkpoint_that_cannot_be_committed_is_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    keep, job = keeper(warnings), job_in(tmp_path)
    keep.newest(job)
    keep.begin(job, 4)
    keep.collect(save(tmp_path, 5, 7))
    assert "the checkpoint of step 5 is not kept" in warnings[0]


def test_a_new_run_moves_old_checkpoints_aside_only_if_told(tmp_path: Path) -> None:
    keep, job = keeper([]), job_in(tmp_path)
    keep.newest(job)
    keep.begin(job, 4)
    keep.collect(save(tmp_path, 5, 0))
    keep.collect(save(tmp_path, 5, 1))
    with pytest.raises(CheckpointError, match="--new --overwrite"):
        keeper([], new=True).newest(job)
    fresh = keeper([], new=True, overwrite=True)
    assert fresh.newest(job) is None
    fresh.begin(job, 4)
    fresh.collect(save(tmp_path, 2, 0))
    fresh.collect(save(tmp_path, 2, 1))
    found = fresh.newest(job)  # a rollback of the new run finds the new run's own
    assert found is not None
    assert found.step == 2
