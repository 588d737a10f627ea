"""Marks of values, which differ once a value has changed, and values in words."""

import dataclasses
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from varuna.process.scripts import LIBRARIES

_DEEPEST = 3
_MOST, _SMALL, _FEW = 256, 16, 2
"""Elements that are looked at, evenly spread: of plain values; of those deep inside, of anything else, of tensors and
arrays; and of longer lists of anything else, which are data. Of tensors there is torch's count of writes, too."""
_LEGIBLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16}
_LEGIBLE |= {torch.float32, torch.float64, torch.complex64, torch.complex128}
_LONGEST = 60

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def mark_of(value: Any, names: Collection[str] = (), depth: int = 0) -> Any:
    """Return something hashable or comparable that is equal as long as the value is the same.

    Args:
        value: anything. Of an object that is none of Python's own, its plain attributes in ``names``.
        names: of attributes that are read.
        depth: of containers around it.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, PLAIN):
        return value if value == value else repr(value)  # NaN is not equal to itself
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        is_flat = value.dtype != object and value.flags.c_contiguous
        values = _spread(value.reshape(-1), _SMALL).tobytes() if is_flat else b""
        return value.shape, value.__array_interface__["data"] if value.size > _SMALL or not is_flat else 0, values
    if depth >= _DEEPEST:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(k): mark_of(value[k], names, depth + 1) for k in islice(value, _MOST)}, len(value)
    if isinstance(value, list | tuple | deque):
        given = list(value) if isinstance(value, deque) else value
        if _is_data(given):
            return tuple(map(id, _spread(given, _FEW))), len(given)
        most = _MOST if depth < _DEEPEST - 1 and given and isinstance(given[0], PLAIN) else _SMALL
        return [mark_of(each, names, depth + 1) for each in _spread(given, most)], len(given)
    if isinstance(value, Set):
        return frozenset(map(repr, list(value)[:_MOST])), len(value)
    return _of_object(value, names, depth)


def _of_object(value: Any, names: Collection[str], depth: int) -> Any:
    if isinstance(value, array | bytearray):
        return mark_of(np.asarray(memoryview(value)))
    if isinstance(value, ContextVar):
        return mark_of(value.get(None), names, depth)
    if isinstance(value, torch.Generator | np.random.Generator) or callable(value) or hasattr(value, "__getitem__"):
        return id(value)  # an object with code of its own is looked into where that is read
    is_config = dataclasses.is_dataclass(value) or hasattr(type(value), "to_dict")
    if not is_config and not _is_plain_object(type(value).__module__):
        return id(value)
    slots = (name for each in type(value).__mro__ for name in vars(each).get("__slots__", ()) if name in names)
    own = {**{name: getattr(value, name, None) for name in slots}, **(attributes(value) or {})}
    return type(value).__name__, {k: mark_of(v, names, depth + 1) for k, v in own.items() if k in names}


def attributes(value: Any) -> Any:
    """The attributes of an object, without code of its class; None: it has none of its own."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _is_data(value: Sequence[Any]) -> bool:
    return len(value) > _SMALL and not isinstance(value[0], PLAIN)


def ways_into(value: Any) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield ways to entries to look at, of a list that is data: a sample may get more of them, as a cache does."""
    if not isinstance(value, list | tuple):
        return
    if not _is_data(value):  # several data sets, for one
        for number, each in enumerate(value[:_SMALL]):
            yield from ((("[", number), *way) for way in ways_into(each))
        return
    for number in _spread(range(len(value)), _FEW):
        sample = value[number]
        names = [(".", key) for key in getattr(sample, "__dict__", ())]
        keys = sample if isinstance(sample, Mapping) else range(len(sample) if type(sample) in (list, tuple) else 0)
        inner = names or [("[", key) for key in keys]
        yield from ((("[", number), key) for key in inner[:_SMALL]) if inner else [(("[", number),)]


def is_users_object(value: Any) -> bool:
    """Return whether a value has attributes, and a class of the user's, or one for any attributes."""
    is_code = isinstance(value, type | Tensor | torch.nn.Module) or hasattr(value, "__code__")
    return not is_code and attributes(value) is not None and _is_plain_object(type(value).__module__)


@lru_cache(maxsize=1024)
def _is_plain_object(module: str) -> bool:
    """Return whether objects of classes from there are the user's values, not a library's, as a logger is."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module in ("types", "argparse") or not any(part in file for part in LIBRARIES)


def _of_tensor(value: Tensor) -> Any:
    if isinstance(value, FakeTensor):
        return "a tensor without values, left over from capture"
    with torch._C.DisableTorchFunctionSubclass():  # it may be one of a model that is watched
        shape, pointer = tuple(value.shape), value.data_ptr() if value.layout is torch.strided else id(value)
        values = _spread(value.detach().view(-1), _SMALL).tolist() if _is_legible(value) else None
    told = values if values is not None and all(each == each for each in values) else repr(values)
    is_whole = values is not None and len(values) == value.numel()
    return (shape, told) if is_whole else (shape, pointer, value._version, told)


def _is_legible(value: Tensor) -> bool:
    """Return whether values can be read one by one, at once: not of a wrapper, nor of another device."""
    is_plain = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and value.layout is torch.strided
    return is_plain and value.device.type == "cpu" and value.dtype in _LEGIBLE and value.is_contiguous()


class SomeValues:
    """Values of many tensors on the CPU, a few of each, which tell writes that torch does not count, as NumPy's are."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Look at them."""
        found = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)
        for each in tensors:
            if _is_legible(each):
                middle = max(0, each.numel() - _SMALL) // 2  # values that lie together are read fastest
                found[each.dtype].append((each, each.detach().view(-1)[middle : middle + _SMALL]))
        self._found = list(found.values())
        self.remember()

    def remember(self) -> None:
        """Remember how they are now."""
        self.seen = self._now()

    def written(self) -> list[Tensor]:
        """Tensors that have other values than when they were looked at."""
        now = self._now()
        if all(map(torch.equal, now, self.seen)):
            return []
        odd = []
        for found, *both in zip(self._found, now, self.seen, strict=True):
            sizes = [values.numel() * values.element_size() for _, values in found]
            parts = zip(found, *(torch.split(each, sizes) for each in both), strict=True)
            odd += [each for (each, _), one, other in parts if not torch.equal(one, other)]
        return odd

    def _now(self) -> list[Tensor]:
        return [torch.cat([values for _, values in found]).view(torch.uint8) for found in self._found]


def _spread(value: Any, most: int) -> Any:
    """Return at most ``most`` elements, evenly spread."""
    return value[:: -(-len(value) // most) or 1]


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Tensor) and (value.numel() > _SMALL or isinstance(value, FakeTensor)):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return f"tensor({value.detach().tolist()})"
    value = value.item() if isinstance(value, np.generic) else value
    is_told = isinstance(value, (*PLAIN, Mapping, list, tuple, deque, Set))
    text = repr(value) if is_told else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
