"""Values of a user's ``state_dict()``, as JSON and back: nothing is ever unpickled."""

import base64
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPE_NAMES, DTYPES, JSON
from varuna.core.errors import UsageError

_KIND = "varuna:kind"


def as_json(value: object, where: str) -> JSON:
    """Encode a value as JSON: numbers, texts, None, bytes, tensors, arrays, and lists, tuples and dicts of these.

    Args:
        value: from the user's ``state_dict()``.
        where: how the user finds it, for messages.

    Raises:
        UsageError: it is something else.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic() if not isinstance(value, np.void):
            return as_json(value.item(), where)
        case bytes():
            return {_KIND: "bytes", "data": _text(value)}
        case Tensor() if value.dtype in DTYPE_NAMES:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            data = _text(flat.view(torch.uint8).numpy().tobytes())
            return {_KIND: "tensor", "dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data": data}
        case np.ndarray() if value.dtype.kind in "biufc":
            data = _text(np.ascontiguousarray(value).tobytes())
            return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
        case list():
            return [as_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
        case tuple():
            return {_KIND: "tuple", "items": as_json(list(value), where)}
        case Mapping():
            items = [(key, as_json(each, f"{where}[{key!r}]")) for key, each in value.items()]
            if all(type(key) is str for key, _ in items) and _KIND not in value:
                return dict(items)
            return {_KIND: "dict", "items": [[as_json(key, f"a key of {where}"), each] for key, each in items]}
    raise UsageError(
        f"{where} is a {type(value).__name__}, which checkpoints cannot hold: they take numbers, texts, None, bytes, "
        "tensors, arrays, and lists, tuples and dicts of these. Return one of these from state_dict()."
    )


def from_json(value: JSON) -> Any:
    """Decode what ``as_json`` made; tensors come back on the CPU."""
    match value:
        case list():
            return [from_json(each) for each in value]
        case {"varuna:kind": "bytes", "data": str(data)}:
            return base64.b64decode(data)
        case {"varuna:kind": "tensor", "dtype": str(dtype), "shape": list(shape), "data": str(data)}:
            flat = torch.frombuffer(bytearray(base64.b64decode(data)) or bytearray(1), dtype=torch.uint8)
            return (flat if data else flat[:0]).view(DTYPES[dtype]).reshape(_sizes(shape))
        case {"varuna:kind": "array", "dtype": str(dtype), "shape": list(shape), "data": str(data)}:
            return np.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(_sizes(shape))
        case {"varuna:kind": "tuple", "items": list(items)}:
            return tuple(from_json(each) for each in items)
        case {"varuna:kind": "dict", "items": list(items)}:
            return dict(from_json(pair) for pair in items)
        case dict():
            return {key: from_json(each) for key, each in value.items()}
    return value


def _sizes(shape: list[JSON]) -> tuple[int, ...]:
    return tuple(cast(list[int], shape))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
