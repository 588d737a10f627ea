"""Values of a user's object as JSON and back, and which objects consist of nothing but their attributes.

JSON has no tuples, sets or tensors: such a value is written as a table with one entry, whose key says what it is.
"""

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPE_NAMES, DTYPES, JSON

MOST_ELEMENTS = 64
"""Of a tensor that is written as numbers."""

Put = Callable[[str, Tensor], bool]
"""Takes a tensor out of a value, under the path that leads to it; False: it is to be written as numbers."""


class NotPlainError(Exception):
    """A value is something else than numbers, texts, small tensors, and containers of those."""


def as_json(value: Any, put: Put = lambda path, value: False, path: str = "") -> JSON:
    """A value as JSON.

    Args:
        value: any.
        put: is asked for each tensor.
        path: where the value is.

    Raises:
        NotPlainError: it has no place in JSON.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"at": path} if put(path, value) else _numbers(value)
    if isinstance(value, list | tuple | deque):
        items: list[JSON] = [as_json(each, put, f"{path}[{number}]") for number, each in enumerate(value)]
        if type(value) is list:
            return items
        if isinstance(value, deque):
            return {"deque": [value.maxlen, items]}
        if type(value) in (tuple, torch.Size):
            return {"tuple": items}
    if type(value) is set:
        return {"set": sorted((as_json(each) for each in value), key=repr)}  # a set has no order of its own
    if isinstance(value, dict) and not any(isinstance(key, Tensor) for key in value):
        return {"dict": [[as_json(key), as_json(each, put, f"{path}[{key!r}]")] for key, each in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.number | np.bool_):
        return {"numpy": [value.dtype.name, value.item()]}
    raise NotPlainError(f"a {type(value).__name__}")


def from_json(value: JSON, take: Callable[[str], Tensor] | None = None, like: Any = None) -> Any:
    """Inverse of ``as_json``.

    Args:
        value: what it returned.
        take: gives back the tensor that was taken out under a path.
        like: a value of the same form, whose containers' classes and devices the new one gets.
    """
    if isinstance(value, list):
        return [from_json(each, take) for each in value]
    match value:
        case {"at": str(path)} if take is not None:
            return take(path)
        case {"tensor": [str(dtype), list(shape), list(numbers)]}:
            where = like.device if isinstance(like, Tensor) else None
            flat = torch.tensor(numbers, dtype=DTYPES[dtype], device=where)
            return flat.reshape(torch.Size([int(str(size)) for size in shape]))
        case {"deque": [maxlen, list(items)]}:
            return deque((from_json(each, take) for each in items), maxlen)  # type: ignore[arg-type]
        case {"tuple": list(items)}:
            return tuple(from_json(each, take) for each in items)
        case {"set": list(items)}:
            return {from_json(each) for each in items}
        case {"dict": list(items)}:
            pairs: Any = items
            found = {from_json(key): from_json(each, take) for key, each in pairs}
            if isinstance(like, dict) and type(like) is not dict:
                like.clear()
                like.update(found)
                return like
            return found
        case {"dtype": str(name)}:
            return getattr(torch, name)
        case {"numpy": [str(name), number]}:
            return np.dtype(name).type(number)
    return value


def _numbers(value: Tensor) -> JSON:
    if value.numel() > MOST_ELEMENTS or value.dtype not in DTYPE_NAMES or value.is_complex() or value.is_meta:
        raise NotPlainError(f"a tensor of {value.numel()} elements of {value.dtype}")
    numbers: list[JSON] = value.detach().reshape(-1).tolist()
    return {"tensor": [DTYPE_NAMES[value.dtype], list(value.shape), numbers]}


def is_plain_object(value: Any) -> bool:
    """Return whether an object consists of its attributes, so that copies of those make a copy of it."""
    kind: Any = type(value)
    plain: Any = object
    copies_itself = hasattr(kind, "__deepcopy__") or hasattr(kind, "__copy__") or hasattr(kind, "__slots__")
    reduces = kind.__reduce_ex__ is not plain.__reduce_ex__ or kind.__reduce__ is not plain.__reduce__
    gives_state = getattr(kind, "__getstate__", None) is not getattr(plain, "__getstate__", None)
    is_code = isinstance(value, type | ModuleType) or callable(value)
    return hasattr(value, "__dict__") and not (copies_itself or reduces or gives_state or is_code)
