"""Marks of values, which differ once a value has changed, and values in words."""

import sys
from collections import deque
from collections.abc import Collection, Mapping, Set
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from varuna.process.scripts import LIBRARIES

_DEEPEST = 3
_MOST = 256
"""Most elements of a container that are looked at."""
_SMALL = 16
"""Elements of a tensor whose values are compared; a larger one is known to change by torch's count of writes."""
_LONGEST = 60

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def mark(value: Any, names: Collection[str] = (), depth: int = 0) -> Any:
    """Something hashable or comparable that is equal as long as the value is the same.

    Args:
        value: anything. Of an object that is none of Python's own, its plain attributes in ``names``.
        names: of attributes that are read.
        depth: of containers around it.
    """
    if isinstance(value, PLAIN):
        return value if value == value else repr(value)  # NaN is not equal to itself
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        few = value.size <= _SMALL and value.dtype != object
        return (value.shape, value.tolist()) if few else (id(value), value.__array_interface__["data"])
    if depth >= _DEEPEST:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(k): mark(value[k], names, depth + 1) for k in list(value)[:_MOST]}, len(value)
    if isinstance(value, list | tuple | deque):
        return [mark(each, names, depth + 1) for each in list(value)[:_MOST]], len(value)
    if isinstance(value, Set):
        return frozenset(map(repr, list(value)[:_MOST])), len(value)
    if isinstance(value, torch.Generator | np.random.Generator) or callable(value) or hasattr(value, "__getitem__"):
        return id(value)  # an object with code of its own is looked into where that is read
    if not _is_plain_object(type(value).__module__):
        return id(value)
    own = getattr(value, "__dict__", {})
    return type(value).__name__, {k: mark(v, names, depth + 1) for k, v in list(own.items()) if k in names}


@lru_cache(maxsize=1024)
def _is_plain_object(module: str) -> bool:
    """Return whether objects of classes from there are the user's values, not a library's, as a logger is."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module in ("types", "argparse") or not any(part in file for part in LIBRARIES)


def _of_tensor(value: Tensor) -> Any:
    if isinstance(value, FakeTensor):
        return "a tensor without values, left over from capture"
    if value.numel() <= _SMALL and value.device.type == "cpu" and value.layout is torch.strided:
        return tuple(value.shape), repr(value.detach().tolist())
    return tuple(value.shape), value.data_ptr() if value.layout is torch.strided else id(value), value._version


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Tensor) and (value.numel() > _SMALL or isinstance(value, FakeTensor)):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return f"tensor({value.detach().tolist()})"
    is_told = isinstance(value, (*PLAIN, Mapping, list, tuple, deque, Set))
    text = repr(value) if is_told else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
