"""Files of sums of gradients, written and read; ``checkpoint.saved_sums`` knows what they are of."""

import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.again import seen_twice
from varuna.checkpoint.header import header
from varuna.checkpoint.io.section_state import DTYPE_NAMES, DTYPES
from varuna.checkpoint.names import step_folder
from varuna.checkpoint.saved_sums import SumsLabel, beginning_of, metadata_of
from varuna.core.errors import DamagedCheckpoint, ObjectMissing
from varuna.core.saved import ITEM_BYTES
from varuna.store.base import Store

_CHUNK_BYTES = 8 * 2**20
_SAMPLED = 2**14
"""Elements of each parameter that are compared: an update changes all of them."""


class StoredTensors(NamedTuple):
    """Tensors of a file, and its label."""

    label: SumsLabel
    tensors: dict[str, Tensor]


def fingerprint(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Return a checksum over the beginnings of trained parameters, as they are computed with."""
    found = 0
    for name in sorted(parameters):
        sample = parameters[name].detach().reshape(-1)[:_SAMPLED].cpu()
        sample = sample.to(dtype) if sample.is_floating_point() else sample
        found = zlib.crc32(sample.contiguous().view(torch.uint8).numpy().data, found)
    return found


def write_sums(store: Store, step: int, file: str, label: SumsLabel, tensors: Mapping[str, Tensor]) -> None:
    """Write flat tensors durably; their label gets the checksum.

    Raises:
        StoreError: it cannot be written; nothing is left under its name.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    data = [value.view(torch.uint8).numpy().data for _, value in ordered]
    crc32 = 0
    for each in data:
        crc32 = zlib.crc32(each, crc32)
    facts = [(name, DTYPE_NAMES[value.dtype], tuple(value.shape), value.nbytes) for name, value in ordered]
    beginning = header(facts, metadata_of(step, label.model_copy(update={"crc32": crc32})))

    def chunks() -> Iterator[bytes | memoryview]:
        yield beginning
        for each in data:
            for begin in range(0, len(each), _CHUNK_BYTES):
                yield each[begin : begin + _CHUNK_BYTES]

    store.write(f"{step_folder(step)}/{file}", chunks)


def read_sums(store: Store, step: int, file: str) -> StoredTensors:
    """Read a file and compare its checksum; one that is damaged is removed.

    Raises:
        DamagedCheckpoint: it is not what was written, or it is gone.
        StoreError: the store cannot be read.
    """
    name = f"{step_folder(step)}/{file}"
    try:
        return seen_twice(lambda: _read(store, name))
    except (DamagedCheckpoint, ObjectMissing) as error:
        store.remove(name)
        raise DamagedCheckpoint(str(error)) from error


def _read(store: Store, name: str) -> StoredTensors:
    label, entries = beginning_of(store, name)
    tensors, crc32 = dict[str, Tensor](), 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        size_bytes = entry.elements * ITEM_BYTES[entry.dtype]
        if size_bytes:  # no memory for what is not there
            store.read_into(name, entry.begin + size_bytes - 1, memoryview(bytearray(1)))
        tensor = tensors[key] = torch.empty(entry.elements, dtype=DTYPES[entry.dtype])
        view = tensor.view(torch.uint8).numpy().data
        for begin in range(0, len(view), _CHUNK_BYTES):
            store.read_into(name, entry.begin + begin, view[begin : begin + _CHUNK_BYTES])
        crc32 = zlib.crc32(view, crc32)
    if crc32 != label.crc32:
        raise DamagedCheckpoint(f"{store.url}/{name} is damaged: its checksum does not match")
    return StoredTensors(label, tensors)
