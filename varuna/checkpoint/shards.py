"""A section's state as safetensors: on disk, and on the wire between workers. Nothing is ever unpickled.

The layout of a safetensors file: 8 bytes of header length, a JSON header with dtype, shape and offsets of each
tensor, then their bytes. We write it ourselves, chunk by chunk, so that a section is hashed while it is written,
without a second copy in memory, and equal states give equal bytes. Reading is the library's, which checks.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from varuna.checkpoint.files import shard_name, step_folder, unreadable, write_atomically
from varuna.checkpoint.manifest import expect
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard

JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class SectionState:
    """Everything a section needs to go on.

    Attributes:
        section: its number.
        tensors: flat names, such as ``"parameters/transformer.wte.weight"`` or
            ``"optimizer/transformer.wte.weight/exp_avg"``.
        scalars: optimizer state that is no tensor; NaN and infinities survive.
    """

    section: int
    tensors: dict[str, Tensor]
    scalars: dict[str, JSON] = field(default_factory=dict)


def to_bytes(state: SectionState) -> bytes:
    """The state as a safetensors file.

    Raises:
        CheckpointError: a tensor's dtype has no place in safetensors, or a scalar none in JSON.
    """
    return b"".join(_chunks(state))


def from_bytes(data: bytes) -> SectionState:
    """Inverse of ``to_bytes``, bit for bit; tensors come back on the CPU.

    Raises:
        CheckpointError: the bytes are no state that ``to_bytes`` wrote.
    """
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header["__metadata__"]
        section, scalars = int(metadata["section"]), dict(json.loads(metadata["scalars"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{len(data)} bytes are not the state of a section: {error!r}") from error
    return SectionState(section, tensors, scalars)


def write_shard(directory: Path, step: int, generation: int, state: SectionState) -> SavedShard:
    """Write a section's file durably.

    Args:
        directory: the checkpoint directory.
        step: steps that the state contains.
        generation: the generation that saves.
        state: what to save; it must not change meanwhile.

    Raises:
        CheckpointError: the file cannot be written (nothing is left under its name), or see ``to_bytes``.
    """
    file = shard_name(state.section, generation)
    sha256 = hashlib.sha256()
    size_bytes = 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size_bytes
        for chunk in _chunks(state):
            sha256.update(chunk)
            size_bytes += len(chunk)
            yield chunk

    write_atomically(step_folder(directory, step) / file, counted())
    return SavedShard(step=step, section=state.section, file=file, size_bytes=size_bytes, sha256=sha256.hexdigest())


def read_shard(directory: Path, shard: SavedShard) -> SectionState:
    """Read a section's file and check it against its manifest.

    Raises:
        CheckpointError: it is missing, unreadable, damaged, or of another section.
    """
    path = step_folder(directory, shard.step) / shard.file
    try:
        data = path.read_bytes()
        expect(shard, path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        state = from_bytes(data)
        if state.section != shard.section:
            raise CheckpointError(f"{path} holds section {state.section}, but its manifest says {shard.section}")
    except (CheckpointError, OSError) as error:
        problem = unreadable(path, error) if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{problem}. Restore it from a copy, or remove {path.parent} to go on from the checkpoint before it."
        ) from error
    return state


def _chunks(state: SectionState) -> Iterator[bytes | memoryview]:
    """Header, then each tensor's bytes.

    Raises:
        CheckpointError: see ``to_bytes``.
    """
    for name, tensor in state.tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} of section {state.section} is {tensor.dtype}, which safetensors lacks")
    # Widest dtype first keeps every tensor aligned within the file.
    tensors = sorted(state.tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    yield _header(state, tensors)
    for _, tensor in tensors:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        yield flat.contiguous().view(torch.uint8).numpy().data


def _header(state: SectionState, tensors: list[tuple[str, Tensor]]) -> bytes:
    """Length and JSON header, padded so that the tensors start at a multiple of 8.

    Raises:
        CheckpointError: a scalar has no place in JSON.
    """
    try:
        scalars = json.dumps(state.scalars, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"scalars of section {state.section} are not JSON: {error}") from error
    header: dict[str, object] = {"__metadata__": {"section": str(state.section), "scalars": scalars}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
