"""Durable parts of a section, as workers report them and manifests list them; and how often to save."""

import json
from math import inf, prod, sqrt
from typing import Self

from pydantic import Field, model_validator

from varuna.core.plan import Plan
from varuna.core.value import Value

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
    "C64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by safetensors' name of its dtype."""

SAVED_EVERY_S, ALONE_EVERY_S = 600.0, 60.0
"""Between checkpoints, and between those of a state that is held once while no loss was seen."""
_LEAST_S, _STALLS = 10.0, 20
"""The least that Young's rule may say; and, without a rate of losses, the interval in stalls of a checkpoint."""
_COUNTED = 8
"""Holders beyond which an interval would be longer than any run."""

_DEEPEST = 500
"""Lists and objects in each other: code that walks through them must not run out of stack."""
_LARGEST_BYTES = 2**62


class Piece(Value):
    """A run of elements of one tensor, as they lie in a shard's file."""

    name: str = Field(description="the tensor's, such as 'optimizer/wte.weight/exp_avg'")
    dtype: str = Field(description="safetensors' name")
    shape: tuple[int, ...] = Field(description="of the whole tensor")
    first: int = Field(ge=0, description="first element, counted in the flattened tensor")
    count: int = Field(ge=0, description="elements")
    offset: int = Field(ge=0, description="byte within the file where they begin")
    crc32: int = Field(default=0, ge=0, description="of the bytes")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name} is of the unknown dtype {self.dtype!r}")
        if min(self.shape, default=0) < 0 or prod(size or 1 for size in self.shape) > _LARGEST_BYTES // 8:
            raise ValueError(f"{self.name} cannot have the shape {self.shape}")
        if self.first + self.count > prod(self.shape):
            raise ValueError(f"{self.name} of shape {self.shape} has no {self.first + self.count} elements")
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of the run."""
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def is_whole(self) -> bool:
        """Whether this is all of its tensor."""
        return self.count == prod(self.shape)


class SavedShard(Value):
    """One part of a section in an unfinished checkpoint, durable in the run's store."""

    step: int
    generation: int
    section: int
    part: int = Field(default=0, ge=0)
    parts: int = Field(default=1, ge=1, description="into how many the section is divided")
    file: str
    size_bytes: int = Field(ge=0)
    pieces: tuple[Piece, ...] = ()
    scalars: str = Field(default="{}", description="JSON of optimizer state that is not a tensor; in part 0")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        ends = (piece.offset + piece.size_bytes for piece in self.pieces)
        if max(sum(piece.size_bytes for piece in self.pieces), *ends, 0) > self.size_bytes:
            raise ValueError(f"the pieces of {self.file} are not within its {self.size_bytes} bytes")
        if not _is_object(self.scalars):
            raise ValueError(f"the scalars of {self.file} are not a JSON object")
        return self


def _is_object(text: str) -> bool:
    """Return whether text is a JSON object that is not too deep to walk through."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    depth, level = 0, [value]
    while level and depth <= _DEEPEST:
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        depth, level = depth + 1, [value for values in inside for value in values]
    return isinstance(value, dict) and depth <= _DEEPEST


def young_s(stall_s: float, between_losses_s: float) -> float:
    """Return the interval of Young's rule, at which what saving stops, and what losses undo, cost the same.

    Args:
        stall_s: how long a checkpoint stops training.
        between_losses_s: on average.
    """
    # The minimum over t of stall / t + t / (2 between): a loss undoes half an interval on average.
    return sqrt(2.0 * stall_s * between_losses_s)


def paying_every_s(stall_s: float, losses_per_hour: float, plan: Plan, usual_s: float = ALONE_EVERY_S) -> float:
    """Return the seconds between checkpoints that pay for a run that outlives the loss of workers.

    A loss undoes what came after the newest checkpoint where it takes the last holder of a section. With one replica
    every loss may. Otherwise others must go at the same moment: of N workers any, so each further replica, or a copy in
    another worker's memory, makes it N times rarer.

    Args:
        stall_s: how long a checkpoint stops training.
        losses_per_hour: that were seen; 0: none.
        plan: that runs.
        usual_s: with one replica, while no loss was seen; with more, nothing says that they pay then.
    """
    if losses_per_hour:
        between_s = 3600 / losses_per_hour * plan.workers ** (min(plan.holders, _COUNTED) - 1)
        return max(min(usual_s, _LEAST_S), young_s(stall_s, between_s))
    return max(usual_s, _STALLS * stall_s) if plan.holders == 1 else inf
