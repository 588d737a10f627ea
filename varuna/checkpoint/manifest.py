"""The manifest, which makes shards a checkpoint: it is written last, and names each of them with its checksums."""

import re
import zlib
from collections.abc import Iterable
from functools import partial
from math import prod
from typing import Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from varuna.checkpoint.again import seen_twice
from varuna.checkpoint.names import (
    DAMAGED,
    MANIFEST,
    START_AFRESH,
    ShardName,
    parse_shard_file,
    parse_step,
    parse_sums_file,
    step_folder,
)
from varuna.core.errors import CheckpointError, DamagedCheckpoint, ObjectExists, ObjectMissing
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sample_digest import OF_SETS, begin_alike
from varuna.core.saved import Piece, SavedShard
from varuna.core.value import Value
from varuna.store.base import Store

_SEALED = re.compile(rb'\{"crc32": (\d{1,10}), "manifest": (.*)\}\n', re.DOTALL)


class Manifest(Value):
    """A complete checkpoint: the state of every section after ``step`` committed steps.

    The position in the sample order is ``step * global_batch``, and schedulers are replayed from step 0, so neither
    needs a field of its own; a loss scale is among the scalars of each section.
    """

    version: Literal[3] = 3
    run_id: str
    writer: str = Field(description="who committed it: tells one's own write from another's")
    step: int = Field(ge=0, description="steps committed, which is the next step to run")
    generation: int = Field(ge=0, description="the generation that wrote it")
    state_digest: str = Field(description="hash over names and shapes of all state, by section")
    code_digest: str = Field(default="", description="of the model that wrote it; another one's is checked anew")
    sections: int = Field(ge=1)
    seed: int
    global_batch: int = Field(ge=1, description="examples per step, M")
    samples: int | None = Field(
        default=None, ge=0, description="len(dataset); 0: it has none; None: written before this was noted"
    )
    first_samples: str = Field(default="", description="digest of the samples that the run began with")
    plan: Plan = Field(description="that wrote it; any other can read it")
    shards: tuple[SavedShard, ...] = Field(description="by section, then part")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        found = [(shard.section, shard.part) for shard in self.shards]
        parts = {shard.section: shard.parts for shard in self.shards}
        if len(parts) != self.sections or sum(parts.values()) != len(found):  # or numbers may be without bounds
            raise ValueError(f"{len(found)} shards are not all parts of {self.sections} sections")
        if found != [(section, part) for section in range(self.sections) for part in range(parts.get(section, 1))]:
            raise ValueError(f"shards {found} are not all parts of {self.sections} sections")
        for shard in self.shards:
            if shard.step != self.step or shard.generation != self.generation:
                raise ValueError(f"{shard.file} is of step {shard.step}, generation {shard.generation}")
            name = ShardName(shard.section, shard.part, parts[shard.section], self.generation)
            if parse_shard_file(shard.file) != name:
                raise ValueError(f"{shard.file} is not part {shard.part} of section {shard.section}")
        for section in range(self.sections):
            _check_covered(section, (piece for shard in self.shards_of(section) for piece in shard.pieces))
        return self

    @property
    def micro_batch(self) -> int:
        """Examples, m: kept for the whole run."""
        return self.plan.micro_batch

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)

    def shards_of(self, section: int) -> tuple[SavedShard, ...]:
        """Return all shards of a section, by part."""
        return tuple(shard for shard in self.shards if shard.section == section)


def _check_covered(section: int, pieces: Iterable[Piece]) -> None:
    """Check that one piece covers each element of each tensor; otherwise memory would stay uninitialised.

    Raises:
        ValueError: it is not so.
    """
    reached: dict[str, int] = {}
    tensors: dict[str, Piece] = {}
    for piece in pieces:
        first = tensors.setdefault(piece.name, piece)
        if piece.first != reached.get(piece.name, 0) or (piece.shape, piece.dtype) != (first.shape, first.dtype):
            raise ValueError(f"it does not cover section {section}: {piece.name} has gaps")
        reached[piece.name] = piece.first + piece.count
    for name, piece in tensors.items():
        if reached[name] != prod(piece.shape):
            raise ValueError(f"it does not cover section {section}: the end of {name} is missing")


class StepFolder(NamedTuple):
    """A checkpoint's folder as a listing shows it, finished or not."""

    step: int
    sizes: dict[str, int]
    """file -> bytes"""

    @property
    def is_committed(self) -> bool:
        """Whether it has a manifest, readable or not."""
        return MANIFEST in self.sizes

    @property
    def is_damaged(self) -> bool:
        """Whether a reader has found wrong bytes in it."""
        return DAMAGED in self.sizes


def seal(manifest: Manifest) -> bytes:
    """Make the manifest's file: JSON around JSON, with a checksum of the inner text."""
    body = manifest.model_dump_json(indent=1).encode()
    return b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body)


def survey(store: Store) -> list[StepFolder]:
    """List all checkpoints' folders, newest first; their files are not read."""
    steps = [step for folder in store.folders() if (step := parse_step(folder)) is not None]
    return [find_step(store, step) for step in sorted(steps, reverse=True)]


def find_step(store: Store, step: int) -> StepFolder:
    """List the folder of a step."""
    folder = step_folder(step)
    return StepFolder(step, {e.name.removeprefix(f"{folder}/"): e.size_bytes for e in store.entries(folder)})


def read_manifest(store: Store, step: int) -> Manifest:
    """Read the manifest of a step.

    Raises:
        ObjectMissing: there is none.
        DamagedCheckpoint: it is not valid, or belongs to another step, also some seconds later.
        StoreError: it cannot be read.
    """
    return seen_twice(lambda: _manifest(store, step))


def _manifest(store: Store, step: int) -> Manifest:
    name = f"{step_folder(step)}/{MANIFEST}"
    sealed = _SEALED.fullmatch(store.get(name))
    if sealed is None or zlib.crc32(sealed[2]) != int(sealed[1]):
        raise DamagedCheckpoint(f"{store.url}/{name} is damaged: its checksum does not match")
    try:
        manifest = Manifest.model_validate_json(sealed[2])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "as a whole:"
        raise DamagedCheckpoint(
            f"{store.url}/{name} is not a manifest of this Varuna: {where} {first['msg']}"
        ) from error
    if manifest.step != step:
        raise DamagedCheckpoint(
            f"{store.url}/{name} is the manifest of step {manifest.step}: the folder was renamed or copied"
        )
    return manifest


def check_present(store: Store, folder: StepFolder, shards: Iterable[SavedShard]) -> None:
    """Compare a listing with shards: each must be there with its size. Checksums are left to those who read.

    Listings of some stores lag behind: what is not in one as it should be is asked for by its name.

    Raises:
        DamagedCheckpoint: the first shard that is missing or has another size, also some seconds later.
        StoreError: the store cannot be read.
    """
    for shard in shards:
        if folder.sizes.get(shard.file) != shard.size_bytes:
            name = f"{step_folder(folder.step)}/{shard.file}"
            seen_twice(partial(_check_size, store, name, shard.size_bytes))


def _check_size(store: Store, name: str, expected: int) -> None:
    try:
        found = store.size_bytes(name)
    except ObjectMissing as error:
        raise DamagedCheckpoint(f"{store.url}/{name} is missing") from error
    if found != expected:
        raise DamagedCheckpoint(f"{store.url}/{name} is damaged: expected {expected} bytes, found {found}")


def intact(store: Store, folder: StepFolder) -> Manifest:
    """Read the manifest of a folder whose shards are all there, as far as a listing can tell.

    Raises:
        DamagedCheckpoint: it cannot be used.
        StoreError: the store cannot be read.
    """
    if folder.is_damaged:
        reason = store.get(f"{step_folder(folder.step)}/{DAMAGED}").decode(errors="replace").strip()
        raise DamagedCheckpoint(
            f"it was marked as damaged: {reason} (`varuna checkpoints verify` removes the mark if it is wrong)"
        )
    manifest = read_manifest(store, folder.step)
    check_present(store, folder, manifest.shards)
    return manifest


def newest_intact(store: Store) -> tuple[Manifest, list[str]] | None:
    """Find the newest checkpoint that can be used, and a warning for each newer one that cannot.

    None if there never was a complete checkpoint: only then may a run start from zero.

    Raises:
        DamagedCheckpoint: there are checkpoints, but none is intact.
        StoreError: the store cannot be read.
    """
    warnings: list[str] = []
    for folder in survey(store):
        # Asked by name as well, since listings may lag: to miss the newest one would send the run back.
        if not folder.is_committed and not _has_manifest(store, folder.step):
            continue
        try:
            return intact(store, folder), warnings
        except (DamagedCheckpoint, ObjectMissing) as error:
            warnings.append(f"the checkpoint of step {folder.step} cannot be used: {error}")
    if warnings:
        raise DamagedCheckpoint(
            f"no checkpoint in {store.url} is intact.\n  "
            + "\n  ".join(warnings)
            + f"\nRestore the named files from a copy, or start afresh with {START_AFRESH}, which moves them aside."
        )
    return None


def _has_manifest(store: Store, step: int) -> bool:
    """Return whether there is one that a listing did not show."""
    try:
        return store.size_bytes(f"{step_folder(step)}/{MANIFEST}") > 0
    except ObjectMissing:
        return False


def commit(store: Store, manifest: Manifest) -> Manifest:
    """Turn durable shards into a checkpoint; returns the manifest that stands for the step.

    An intact checkpoint of the same step stays as it is. A damaged one (the run fell back before it and came
    here again) is superseded. Files that no manifest names are removed, but for sums of gradients: whether they belong
    to this state they say themselves.

    Raises:
        DamagedCheckpoint: a shard is not where it should be.
        StoreError: the manifest cannot be written.
    """
    name, mark = (f"{step_folder(manifest.step)}/{file}" for file in (MANIFEST, DAMAGED))
    folder = find_step(store, manifest.step)
    if folder.is_committed:
        try:
            return intact(store, folder)
        except (DamagedCheckpoint, ObjectMissing):  # not one that may only not be read, by rights or by a bad day
            store.remove(name)
    try:
        check_present(store, folder, manifest.shards)
    except DamagedCheckpoint as error:
        shared = "" if "://" in store.url else " A local directory must be shared by all machines."
        raise DamagedCheckpoint(
            f"step {manifest.step} cannot be committed: {error}, though it was saved.{shared}"
        ) from error
    # The mark of a damaged one goes first: a crash before the manifest leaves an unfinished folder, which is safe.
    store.remove(mark)
    try:
        store.create(name, seal(manifest))
    except ObjectExists:
        # It is there by now, from an earlier try or from another manager: it stands.
        return intact(store, find_step(store, manifest.step))
    for file in folder.sizes.keys() - {shard.file for shard in manifest.shards} - {MANIFEST, DAMAGED}:
        if parse_sums_file(file) is None:
            store.remove(f"{step_folder(manifest.step)}/{file}")
    return manifest


def mark_damaged(store: Store, step: int, reason: str) -> None:
    """Mark a checkpoint whose bytes are wrong, so that it is never chosen again."""
    try:
        store.create(f"{step_folder(step)}/{DAMAGED}", f"{reason}\n".encode())
    except ObjectExists:
        return


def check_compatible(manifest: Manifest, job: JobFacts) -> None:
    """Check that a job continues the run that wrote a checkpoint: same state, same samples. Its script may differ.

    Raises:
        CheckpointError: parameters, sections, seed, global batch, the dataset's length or its samples differ.
    """
    pairs = {
        "sections": (manifest.sections, len(job.model.sections)),
        "hash of parameters and sections": (manifest.state_digest[:12], job.model.state_digest[:12]),
        "seed": (manifest.seed, job.seed),
        "global batch": (manifest.global_batch, job.global_batch),
    }
    differences = [f"{name} was {saved}, is now {now}" for name, (saved, now) in pairs.items() if saved != now]
    if differences:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} (run {manifest.run_id}) belongs to another job: "
            f"{'; '.join(differences)}. Use the model and settings that wrote it, use another checkpoint "
            f"directory, or start afresh with {START_AFRESH}, which moves the old checkpoints aside."
        )
    if job.takes_other_data:
        return
    if manifest.samples is not None and manifest.samples != job.samples:
        was, now = (f"{size} samples" if size else "no length" for size in (manifest.samples, job.samples))
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} (run {manifest.run_id}) was trained on a dataset with {was}, and "
            f"this one has {now}. The order of samples follows from the length, so from here on it would be another "
            "one: some samples would come twice in this epoch, and others not at all. Resume with the dataset that "
            "wrote it. If samples were added or removed on purpose, pass checkpoints=varuna.Checkpoints(path, "
            "other_data=True): positions go on in the order of the new length. To begin anew, start afresh with "
            f"{START_AFRESH}, which moves the old checkpoints aside."
        )
    are_known = manifest.first_samples and job.first_samples
    if are_known and not begin_alike(manifest.first_samples, job.first_samples):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} (run {manifest.run_id}) was trained on other samples: this "
            "dataset does not begin with those that the run began with. Resume with the dataset that wrote it. "
            f"{OF_SETS}. If the data changed on purpose, pass checkpoints=varuna.Checkpoints(path, "
            f"other_data=True). To begin anew, start afresh with {START_AFRESH}, which moves the old checkpoints aside."
        )
