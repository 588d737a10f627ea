"""What makes shards a checkpoint: a manifest, written last, that names each of them with its hash."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from varuna.checkpoint.files import (
    MANIFEST,
    START_AFRESH,
    parse_shard_name,
    step_folder,
    step_folders,
    unreadable,
    write_atomically,
)
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard
from varuna.core.model import JobFacts
from varuna.core.value import Value


class Manifest(Value):
    """A complete checkpoint: the state of every section after ``step`` committed steps."""

    version: Literal[1] = 1
    run_id: str
    step: int = Field(ge=0, description="steps committed, which is the next step to run")
    generation: int = Field(ge=0, description="the generation that wrote it")
    model_digest: str
    sections: int = Field(ge=1)
    seed: int
    global_batch: int = Field(ge=1, description="examples per step, M")
    micro_batch: int = Field(ge=1, description="m, examples")
    shards: tuple[SavedShard, ...] = Field(description="one per section, in order")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        found = [shard.section for shard in self.shards]
        if found != list(range(self.sections)):
            raise ValueError(f"shards of sections {found} are not one for each of {self.sections} sections")
        for shard in self.shards:
            if shard.step != self.step:
                raise ValueError(f"{shard.file} is of step {shard.step}, not {self.step}")
            if parse_shard_name(shard.file) != (shard.section, self.generation):
                raise ValueError(f"{shard.file} is not of section {shard.section}, generation {self.generation}")
        return self


class Collector:
    """Gathers reports of durable shards until a step has all its sections. Pure: commits nothing itself."""

    def __init__(self, job: JobFacts, *, run_id: str, micro_batch: int) -> None:
        """Start empty; the arguments go into the manifests."""
        self._job = job
        self._run_id = run_id
        self._micro_batch = micro_batch
        self._generation = -1  # newest seen
        self._complete = -1  # newest complete step of this generation
        self._pending: dict[int, dict[int, SavedShard]] = {}  # step -> section -> shard

    def add(self, shard: SavedShard) -> Manifest | None:
        """Note a shard; the manifest if its step is complete now.

        Shards of an older generation than the newest seen, and of steps before the newest complete one, are
        dropped: workers save in step order, so what is missing there was skipped and will not come.

        Raises:
            CheckpointError: the shard is not one of this run.
        """
        try:
            section, generation = parse_shard_name(shard.file)
        except ValueError as error:
            raise CheckpointError(f"a worker reported a shard that cannot be: {error}") from error
        sections = len(self._job.model.sections)
        if section != shard.section or section >= sections:
            raise CheckpointError(f"a worker reported {shard.file} as section {shard.section} of {sections}")
        if generation > self._generation:
            self._generation, self._complete, self._pending = generation, -1, {}
        if generation < self._generation or shard.step <= self._complete:
            return None
        shards = self._pending.setdefault(shard.step, {})
        shards[section] = shard
        if len(shards) < sections:
            return None
        self._complete = shard.step
        self._pending = {step: rest for step, rest in self._pending.items() if step > shard.step}
        return Manifest(
            run_id=self._run_id,
            step=shard.step,
            generation=generation,
            model_digest=self._job.model.digest,
            sections=sections,
            seed=self._job.seed,
            global_batch=self._job.global_batch,
            micro_batch=self._micro_batch,
            shards=tuple(shards[number] for number in range(sections)),
        )


def commit(directory: Path, manifest: Manifest) -> Manifest:
    """Turn durable shards into a checkpoint; returns the manifest that stands for the step.

    An intact checkpoint of the same step stays as it is. A damaged one (the run fell back behind it and came
    here again) is superseded.

    Raises:
        CheckpointError: the manifest cannot be written.
    """
    folder = step_folder(directory, manifest.step)
    if (folder / MANIFEST).exists():
        try:
            existing = read_manifest(folder)
            verify_shards(directory, existing)
        except CheckpointError:
            pass
        else:
            return existing
    write_atomically(folder / MANIFEST, [manifest.model_dump_json(indent=1).encode()])
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a step's folder.

    Raises:
        CheckpointError: it cannot be read, is not valid, or belongs to another step.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is not a manifest of this Varuna: {where} {first['msg']}") from error
    if step_folder(folder.parent, manifest.step) != folder:
        raise CheckpointError(f"{path} is the manifest of step {manifest.step}: the folder was renamed or copied")
    return manifest


def manifests(directory: Path) -> list[Manifest]:
    """All readable manifests, newest first; shards are not looked at.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    found = []
    for _, folder in committed_folders(directory):
        try:
            found.append(read_manifest(folder))
        except CheckpointError:
            continue  # newest_valid names these
    return found


def committed_folders(directory: Path) -> list[tuple[int, Path]]:
    """Steps and folders that have a manifest, readable or not, newest first.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    return [(step, folder) for step, folder in step_folders(directory) if (folder / MANIFEST).exists()]


def expect(shard: SavedShard, path: Path, *, size_bytes: int, sha256: str) -> None:
    """Compare what was found in a shard's file with what its manifest says.

    Raises:
        CheckpointError: they differ.
    """
    if size_bytes != shard.size_bytes:
        raise CheckpointError(f"{path} is damaged: expected {shard.size_bytes} bytes, found {size_bytes}")
    if sha256 != shard.sha256:
        raise CheckpointError(f"{path} is damaged: expected SHA-256 {shard.sha256}, found {sha256}")


def verify_shards(directory: Path, manifest: Manifest) -> None:
    """Read every shard of a manifest and compare sizes and hashes.

    Raises:
        CheckpointError: the first shard that is missing, unreadable or damaged.
    """
    for shard in manifest.shards:
        path = step_folder(directory, manifest.step) / shard.file
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size_bytes = file.tell()
        except OSError as error:
            raise unreadable(path, error) from error
        expect(shard, path, size_bytes=size_bytes, sha256=sha256)


def newest_valid(
    directory: Path, *, check: Callable[[Path, Manifest], None] = verify_shards
) -> tuple[Manifest, list[str]] | None:
    """The newest checkpoint whose shards are intact, and a warning for each newer one that is not.

    None if there never was a complete checkpoint: only then may a run start from zero.

    Args:
        directory: the checkpoint directory.
        check: raises ``CheckpointError`` if a manifest's shards cannot be trusted.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
    """
    warnings: list[str] = []
    for step, folder in committed_folders(directory):
        try:
            manifest = read_manifest(folder)
            check(directory, manifest)
        except CheckpointError as error:
            warnings.append(f"the checkpoint of step {step} cannot be used: {error}")
        else:
            return manifest, warnings
    if warnings:
        raise CheckpointError(
            f"no checkpoint in {directory} is intact.\n  "
            + "\n  ".join(warnings)
            + f"\nRestore the named files from a copy, or start afresh with {START_AFRESH}, which moves them aside."
        )
    return None


def check_compatible(manifest: Manifest, job: JobFacts) -> None:
    """Check that a job continues the run that wrote a checkpoint.

    Raises:
        CheckpointError: the model, the seed or the global batch differs.
    """
    pairs = {
        "model digest": (manifest.model_digest, job.model.digest),
        "sections": (manifest.sections, len(job.model.sections)),
        "seed": (manifest.seed, job.seed),
        "global batch": (manifest.global_batch, job.global_batch),
    }
    differences = [f"{name} {saved} there, {now} now" for name, (saved, now) in pairs.items() if saved != now]
    if differences:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} (run {manifest.run_id}) is of another job: "
            f"{'; '.join(differences)}. Go back to the script and settings that wrote it, give another checkpoint "
            f"directory, or start afresh with {START_AFRESH}, which moves the old checkpoints aside."
        )
