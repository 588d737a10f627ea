"""Objects that a function of the script's refers to: by its closure, globals, defaults, or its own object."""

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DEEPEST = 4


def tensors_and_modules(function: object) -> dict[str, Tensor | nn.Module]:
    """Modules and tensors that a function refers to, by the name that it has for each; the outermost ones."""
    found: dict[str, Tensor | nn.Module] = {}
    for name, value in _within("", function, 0, set()):
        found.setdefault(name, value)
    return found


def _within(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    if depth > _DEEPEST or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor | nn.Module):
        yield name, value
        return
    for key, each in _parts(value):
        yield from _within(key if isinstance(key, str) else name, each, depth + 1, seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return what an object refers to, with names where it has names."""
    if isinstance(value, functools.partial):
        yield from ((None, each) for each in (value.func, *value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield value.__func__.__name__, value.__self__
        yield None, value.__func__
    elif isinstance(value, types.FunctionType):
        yield from variables(value)
    elif isinstance(value, Mapping):
        yield from ((str(key).replace(".", "_"), each) for key, each in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((None, each) for each in value)
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        yield from vars(value).items()


def variables(function: types.FunctionType) -> Iterator[tuple[str | None, Any]]:
    """Yield what a function can use beside its arguments, with names: closure, globals, defaults (None if by place)."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
    for name in dict.fromkeys(globals_of(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from ((None, each) for each in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def globals_of(code: types.CodeType) -> Iterator[str]:
    """Yield the globals that a function names, and those of functions inside it."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from globals_of(constant)
