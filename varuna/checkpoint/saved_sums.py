"""Sums of gradients of a step, in the folder of the checkpoint that the step began from: what they are of.

A file holds what one replica has added up of one section. It needs no commit: it says itself which micro-batches are in
it, of which job, and on top of which parameters. So a generation that begins from the checkpoint takes what fits, and
the rest of the step runs.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from varuna.checkpoint.manifest import StepFolder, find_step
from varuna.checkpoint.names import parse_sums_file, step_folder
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.core.model import JobFacts
from varuna.core.saved import ITEM_BYTES
from varuna.core.sums import IndexSet, MicroBatchLoss, SectionSum, StoredSum, StoredSums, is_within, numbers_of, union
from varuna.core.value import Value
from varuna.process.threads import AbandoningThreadPool
from varuna.store.base import Store

_MOST_HEADER_BYTES = 64 * 2**20
_MOST_BYTES = 2**62
_READERS, _TRIES = 8, 3
_DTYPES = {"sums": "F32", "statistics": "U8"}
"""Of the tensors that a file may have, by name; the first it must."""


class SumsLabel(Value):
    """The label of a file of sums: its job, parameters, checksum and contents."""

    job: str
    """``job_of`` the job"""
    parameters: int
    """``fingerprint`` of the section's parameters"""
    crc32: int = 0
    """of the tensors' bytes; the label has a checksum of its own in the file"""
    sections: int
    """that have gradients: until there are sums of all, no micro-batch is spared"""
    micro_batch: int
    micro_batches: int
    """of the step"""
    sums: SectionSum
    losses: tuple[MicroBatchLoss, ...] = ()


def job_of(job: JobFacts) -> str:
    """Return a digest of all that must be equal for gradients to be added to another process's; a plan may differ."""
    model = job.model
    parts = (model.digest, model.code_digest, job.global_batch, job.seed, job.metrics, job.precision)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class TensorInFile(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """safetensors' name"""
    elements: int
    begin: int
    """byte within the file"""


class Beginning(NamedTuple):
    """The beginning of a file of sums."""

    label: SumsLabel
    entries: Mapping[str, TensorInFile]


def find_sums(store: Store, folder: StepFolder, job: JobFacts) -> StoredSums | None:
    """Find the store's sums of the step after a checkpoint, for a job that begins there; None: there are none.

    Raises:
        StoreError: the store cannot be read.
    """
    labels, mine = labels_in(store, folder), job_of(job)
    for _ in range(_TRIES):
        again = find_step(store, folder.step)
        if _sums_in(again) == labels.keys():
            break
        labels = labels_in(store, again)  # a worker still writes, and has replaced what was listed
    found = {file: each for file, each in labels.items() if each is not None and each.job == mine}
    if not found:
        return None
    # Of one m only: with another, the same number means other samples.
    micro_batch = next(iter(found.values())).micro_batch
    same = {file: each for file, each in found.items() if each.micro_batch == micro_batch}
    losses = {loss.micro_batch: loss for each in same.values() for loss in each.losses}
    return StoredSums(
        micro_batch=micro_batch,
        sums=tuple(StoredSum(**each.sums.model_dump(), file=file) for file, each in same.items()),
        losses=tuple(losses[number] for number in sorted(losses)),
    )


def whole_micro_batches(labels: Iterable[SumsLabel]) -> tuple[int, int]:
    """Count the micro-batches of a step that the sums of all sections have, and those that the step has. Pure."""
    found: dict[int, list[IndexSet]] = {}
    known, micro_batches, sections = set[int](), 0, 0
    for label in labels:
        found.setdefault(label.sums.section, []).append(label.sums.micro_batches)
        known.update(loss.micro_batch for loss in label.losses)
        micro_batches, sections = label.micro_batches, label.sections
    if len(found) < sections:
        return 0, micro_batches
    return len(known.intersection(*(numbers_of(union(each)) for each in found.values()))), micro_batches


def metadata_of(step: int, label: SumsLabel) -> dict[str, str]:
    """Return what a file's header says beside its tensors."""
    text = label.model_dump_json()
    return {"step": str(step), "label": text, "label_crc32": str(zlib.crc32(text.encode()))}


def labels_in(store: Store, folder: StepFolder) -> dict[str, SumsLabel | None]:
    """Read the label of each file of sums in a folder; None if it has none that can be read.

    Raises:
        StoreError: the store cannot be read.
    """
    files = _sums_in(folder)
    if not files:
        return {}

    def label_of(file: str) -> SumsLabel | None:
        try:
            return beginning_of(store, f"{step_folder(folder.step)}/{file}").label
        except (DamagedCheckpoint, ObjectMissing):  # or it was replaced by a newer one since the listing
            return None

    with AbandoningThreadPool(_READERS, "sums") as readers:
        found = {file: readers.submit(label_of, file) for file in sorted(files)}
        return {file: each.result() for file, each in found.items()}


def remove_sums(store: Store, folder: StepFolder) -> None:
    """Remove all sums in a folder.

    Raises:
        StoreError: one cannot be removed.
    """
    for file in _sums_in(folder):
        store.remove(f"{step_folder(folder.step)}/{file}")


def _sums_in(folder: StepFolder) -> set[str]:
    return {file for file in folder.sizes if parse_sums_file(file) is not None}


def beginning_of(store: Store, name: str) -> Beginning:
    """Read the beginning of a file of sums.

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
        metadata = entries.pop("__metadata__")
        if zlib.crc32(metadata["label"].encode()) != int(metadata["label_crc32"]):
            raise ValueError("the label has another checksum")
        label, start = SumsLabel.model_validate_json(metadata["label"]), 8 + len(text)
        if "sums" not in entries:
            raise ValueError("no sums")
        found = {}
        for key, entry in entries.items():
            (first, last), [count], dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
            if not 0 <= first <= last <= _MOST_BYTES:
                raise ValueError(f"{key} lies from byte {first} to {last}")
            if dtype != _DTYPES[key] or not 0 <= count * ITEM_BYTES[dtype] == last - first:
                raise ValueError(f"{key} has {last - first} bytes for {count} {dtype}")
            found[key] = TensorInFile(dtype, count, start + first)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{store.url}/{name} is not a file of sums of gradients: {error!r}") from error
    if not is_within(label.sums.micro_batches, label.micro_batches):
        raise DamagedCheckpoint(f"{store.url}/{name} has sums of micro-batches that no step has")
    return Beginning(label, found)
