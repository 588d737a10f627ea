"""A section's state, and how it looks as one piece of safetensors. Nothing is ever unpickled.

The layout of a safetensors file: 8 bytes of header length, a JSON header with dtype, shape and offsets of each
tensor, then their bytes. We write it ourselves, chunk by chunk, without a second copy in memory, and equal states
give equal bytes. Reading is the library's, which checks.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from varuna.checkpoint.header import header
from varuna.core.errors import CheckpointError

JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

AVERAGE = "ema"
"""Key of a parameter's average in the optimizer's state."""

DTYPE_NAMES = {
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
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class SectionState:
    """The tensors and scalars that a section needs to continue training.

    Attributes:
        section: its number.
        tensors: flat names, such as ``"parameters/transformer.wte.weight"`` or
            ``"optimizer/transformer.wte.weight/exp_avg"``.
        scalars: optimizer state that is not a tensor; NaN and infinities survive.
    """

    section: int
    tensors: dict[str, Tensor]
    scalars: dict[str, JSON] = field(default_factory=dict)

    def only(self, wanted: Callable[[str], bool]) -> "SectionState":
        """Return the entries whose names are ``wanted``, as references."""
        return SectionState(
            self.section,
            {name: value for name, value in self.tensors.items() if wanted(name)},
            {name: value for name, value in self.scalars.items() if wanted(name)},
        )

    def at_host(self) -> "SectionState":
        """Return the state with tensors in host memory: copies of those that are on a GPU."""
        return SectionState(self.section, {name: value.cpu() for name, value in self.tensors.items()}, self.scalars)


def to_bytes(state: SectionState) -> bytes:
    """Write the state as a safetensors file.

    Raises:
        CheckpointError: a tensor's dtype has no place in safetensors, or a scalar none in JSON.
    """
    return b"".join(_chunks(state))


def from_bytes(data: bytes) -> SectionState:
    """Read what ``to_bytes`` wrote, bit for bit; tensors come back on the CPU.

    Raises:
        CheckpointError: the bytes are not a state that ``to_bytes`` wrote.
    """
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header["__metadata__"]
        section, scalars = int(metadata["section"]), dict(json.loads(metadata["scalars"]))
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{len(data)} bytes are not the state of a section: {error!r}") from error
    return SectionState(section, tensors, scalars)


def _chunks(state: SectionState) -> Iterator[bytes | memoryview]:
    """Yield the header, then each tensor's bytes.

    Raises:
        CheckpointError: see ``to_bytes``.
    """
    for name, tensor in state.tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name} of section {state.section} is {tensor.dtype}, which safetensors does not support"
            )
    # Widest dtype first keeps every tensor aligned within the file.
    tensors = sorted(state.tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    yield _header(state, tensors)
    for _, tensor in tensors:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        yield flat.contiguous().view(torch.uint8).numpy().data


def _header(state: SectionState, tensors: list[tuple[str, Tensor]]) -> bytes:
    """Make the header of a whole section."""
    found = [(name, DTYPE_NAMES[value.dtype], tuple(value.shape), value.nbytes) for name, value in tensors]
    return header(found, {"section": str(state.section), "scalars": scalars_as_json(state)})


def scalars_as_json(state: SectionState) -> str:
    """Return optimizer state that is not a tensor as JSON.

    Raises:
        CheckpointError: a scalar has no place in JSON.
    """
    try:
        return json.dumps(state.scalars, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"scalars of section {state.section} are not JSON: {error}") from error


def bit_sum(value: Tensor) -> int:
    """Return the sum of a tensor's bits as whole numbers, which changes with any bit; on its own device."""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() - flat.numel() % 8
    # A view as int64 must begin at a multiple of its size.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum(dtype=torch.int64))
