"""Sums of gradients of a step, in the folder of the checkpoint that the step began from: what they are of.

A file holds what one replica has added up of one section. Nobody commits it: it says itself which micro-batches are in
it, of which job, and on top of which parameters. So whoever begins from the checkpoint takes what fits, and the rest of
the step runs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from varuna.checkpoint.manifest import StepFolder
from varuna.checkpoint.names import parse_sums_file, step_folder
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.core.model import JobFacts
from varuna.core.saved import ITEM_BYTES
from varuna.core.sums import MicroBatchLoss, SectionSum, Spans, StoredSum, StoredSums, is_within, numbers_of, union
from varuna.core.value import Value
from varuna.process.threads import Crew
from varuna.store.base import Store

_MOST_HEADER_BYTES = 64 * 2**20
_READERS = 8


class SumsLabel(Value):
    """What a file of sums says of itself."""

    job: str
    """``job_of`` the job"""
    parameters: int
    """``fingerprint`` of the section's parameters"""
    crc32: int = 0
    """of the tensors' bytes"""
    micro_batch: int
    micro_batches: int
    """of the step"""
    sums: SectionSum
    losses: tuple[MicroBatchLoss, ...] = ()


def job_of(job: JobFacts) -> str:
    """What must be equal for gradients to be added to those of another process; a plan may differ."""
    model = job.model
    parts = (model.digest, model.code_digest, job.global_batch, job.seed, job.metrics, job.precision)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class TensorInFile(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """safetensors' name"""
    shape: tuple[int, ...]
    begin: int
    """byte within the file"""
    end: int


class Beginning(NamedTuple):
    """What a file begins with."""

    label: SumsLabel
    entries: Mapping[str, TensorInFile]


def find_sums(store: Store, folder: StepFolder, job: JobFacts) -> StoredSums | None:
    """What the store has of the step after a checkpoint, for a job that begins there; None: nothing.

    Raises:
        StoreError: the store cannot be read.
    """
    mine = job_of(job)
    found = {file: each for file, each in labels_in(store, folder).items() if each is not None and each.job == mine}
    if not found or job.memory_apart:  # sums outlast nothing on a GPU
        return None
    micro_batch = next(iter(found.values())).micro_batch
    same = {file: each for file, each in found.items() if each.micro_batch == micro_batch}
    losses = {loss.micro_batch: loss for each in same.values() for loss in each.losses}
    return StoredSums(
        micro_batch=micro_batch,
        sums=tuple(StoredSum(**each.sums.model_dump(), file=file) for file, each in same.items()),
        losses=tuple(losses[number] for number in sorted(losses)),
    )


def whole_micro_batches(labels: Iterable[SumsLabel]) -> tuple[int, int]:
    """How many micro-batches of a step all sums have that there are, and how many the step has. Pure."""
    found: dict[int, list[Spans]] = {}
    known, micro_batches = set[int](), 0
    for label in labels:
        found.setdefault(label.sums.section, []).append(label.sums.micro_batches)
        known.update(loss.micro_batch for loss in label.losses)
        micro_batches = label.micro_batches
    return len(known.intersection(*(numbers_of(union(each)) for each in found.values()))), micro_batches


def labels_in(store: Store, folder: StepFolder) -> dict[str, SumsLabel | None]:
    """By file of sums in a folder: its label; None if it has none that can be read.

    Raises:
        StoreError: the store cannot be read.
    """
    files = sorted(file for file in folder.sizes if parse_sums_file(file) is not None)

    def label_of(file: str) -> SumsLabel | None:
        try:
            return beginning_of(store, f"{step_folder(folder.step)}/{file}").label
        except (DamagedCheckpoint, ObjectMissing):  # or it was replaced by a newer one since the listing
            return None

    with Crew(_READERS, "sums") as readers:
        found = [readers.submit(label_of, file) for file in files]
        return {file: each.result() for file, each in zip(files, found, strict=True)}


def beginning_of(store: Store, name: str) -> Beginning:
    """What a file begins with.

    Raises:
        DamagedCheckpoint: it is not a file of sums.
        ObjectMissing: it is gone, or too short.
    """
    try:
        length = bytearray(8)
        store.read_into(name, 0, memoryview(length))
        size_bytes = int.from_bytes(length, "little")
        if size_bytes > _MOST_HEADER_BYTES:
            raise ValueError(f"a header of {size_bytes} bytes")
        text = bytearray(size_bytes)
        store.read_into(name, 8, memoryview(text))
        entries = json.loads(text)
        label = SumsLabel.model_validate_json(entries.pop("__metadata__")["label"])
        start = 8 + len(text)
        found = {}
        for key, entry in entries.items():
            (first, last), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
            if min(shape, default=0) < 0 or last - first != prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"{key} has {last - first} bytes for {shape}")
            found[key] = TensorInFile(dtype, shape, start + first, start + last)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{store.url}/{name} is not a file of sums of gradients: {error!r}") from error
    if not is_within(label.sums.micro_batches, label.micro_batches):
        raise DamagedCheckpoint(f"{store.url}/{name} has sums of micro-batches that no step has")
    return Beginning(label, found)
