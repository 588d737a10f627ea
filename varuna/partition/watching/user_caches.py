"""Caches of the user's functions (``functools.lru_cache``), which must not keep tensors that have no data.

A table that ``forward`` computes once and keeps would otherwise be found without its values by the next one who asks:
by another attempt to capture the model, or by the model itself when it is run to check the capture.
"""

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

_Cache: Any = functools._lru_cache_wrapper
_NOT_THE_USERS = frozenset({"torch", "sympy", "varuna"})
_found: tuple[int, list[Any]] = (-1, [])
"""number of imported modules, and the caches that there were then"""


@contextmanager
def without_fakes() -> Iterator[None]:
    """Empty the caches in which this block leaves tensors without data."""
    before = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != before.get(id(cache), 0) and _holds_fakes(cache):
                cache.cache_clear()


def _caches() -> list[Any]:
    """Find the caches of all modules and classes, anew where modules were imported since (some 50 ms)."""
    global _found
    if _found[0] != len(sys.modules):
        own = {name: each for name, each in list(sys.modules.items()) if name.partition(".")[0] not in _NOT_THE_USERS}
        caches = [cache for name, each in own.items() for cache in _caches_in(name, getattr(each, "__dict__", {}))]
        _found = len(sys.modules), list({id(cache): cache for cache in caches}.values())
    return _found[1]


def _caches_in(module: str, held: Mapping[str, Any]) -> Iterator[Any]:
    for value in list(held.values()):
        if type(value) is _Cache:
            yield value
        elif isinstance(value, FunctionType):  # a decorator's may call one
            yield from (cell for cell in _closed_over(value) if type(cell) is _Cache)
        elif isinstance(value, staticmethod | classmethod):
            yield from _caches_in(module, {"": value.__func__})
        elif isinstance(value, type) and value.__module__ == module:
            yield from _caches_in("", value.__dict__)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _holds_fakes(cache: Any) -> bool:
    held = [each for each in gc.get_referents(cache) if not callable(each)]  # entries, or a dict or a list of them
    leaves = tree_leaves([held, gc.get_referents(*held)])
    return any(isinstance(leaf, FakeTensor) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves)
