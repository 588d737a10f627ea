"""Copies of a user's objects, in which others take the place of what they refer to; and of functions that remember."""

import copy
import dis
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.originals.referred import globals_of
from varuna.partition.plain_values import is_plain_object
from varuna.partition.watching.own_code import TORCH, VARUNA

_SHARED = (type, CodeType, ModuleType, torch.dtype, torch.device, str, bytes, int, float, complex, type(None))
_MOST = 10_000
"""Items of a container that a function's own state may have; more are data."""


class ObjectCopier:
    """Copies an object and what it holds, with some objects exchanged.

    torch's optimizers copy without their attributes (``copy.deepcopy`` asks for ``__getstate__``), so all attributes
    are copied here one by one. Classes, locks and handles are shared, and functions but for what they remember.
    """

    def __init__(self, exchanged: Mapping[int, Any]) -> None:
        """Copy, with ``exchanged`` in place of the objects of these ids, and ids in place of their ids."""
        self._memo: dict[int, Any] = dict(exchanged)
        self._ids = {old: id(new) for old, new in exchanged.items()}
        self._alive: list[Any] = []  # no id is used twice
        self.optimizers: list[torch.optim.Optimizer] = []
        """the copies made, those inside of others too"""

    def of(self, value: Any) -> Any:
        """The copy of anything."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if type(value) is int and value in self._ids:
            return self._ids[value]
        if isinstance(value, _SHARED):
            return value
        made = self._made(value)
        self._memo[id(value)] = made
        self._alive.append(value)
        return made

    def _made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, FunctionType):
            return independent(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            keywords = {key: self.of(each) for key, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, weakref.ref):
            return weakref.ref(self.of(value()))
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, dict | list | set | deque):
            return self._container(value)
        if isinstance(value, tuple):
            parts = [self.of(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if is_object(value):
            return self._object(value)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:  # noqa: BLE001 - whatever a lock, a stream or a file raises
            return value

    def _container(self, value: Any) -> Any:
        made: Any
        if isinstance(value, dict):
            made = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
            self._memo[id(value)] = made  # before it is filled: it may hold itself
            made.update((self.of(key), self.of(each)) for key, each in value.items())
            return made
        made = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
        self._memo[id(value)] = made
        for each in value:
            made.add(self.of(each)) if isinstance(made, set) else made.append(self.of(each))
        return made

    def _object(self, value: Any) -> Any:
        made = self._memo[id(value)] = object.__new__(type(value))
        for name, each in vars(value).items():
            if not hasattr(each, "_wrapped_by_lr_sched"):  # step(), counted by a scheduler of the script's
                vars(made)[name] = self.of(each)
        if isinstance(made, torch.optim.Optimizer):
            self.optimizers.append(made)
        return made

    def _tensor(self, value: Tensor) -> Tensor:
        """Copy a tensor by an operation, so that fakes copy without memory."""
        with torch.no_grad():
            made = torch.empty_like(value).copy_(value)
        return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made

    def _module(self, value: nn.Module) -> nn.Module:
        """A module with exchanged parameters; its buffers have no values here, since training updates others."""
        for buffer in value.buffers():
            if id(buffer) not in self._memo:
                self._memo[id(buffer)] = torch.empty_like(buffer, device="meta")
                self._alive.append(buffer)
        for parameter in value.parameters():
            self.of(parameter)
        return copy.deepcopy(value, self._memo)


def independent(function: Callable[..., Any] | None, copies: dict[int, Any] | None = None) -> Any:
    """Make a function that does the same, and remembers for itself: what it keeps in closures and globals is copied.

    Args:
        function: the user's.
        copies: by id, those of objects that it refers to; more come to them.
    """
    memory = _Memory({} if copies is None else copies)
    if isinstance(function, functools.partial):
        keywords = {key: memory.of(each) for key, each in function.keywords.items()}
        return functools.partial(independent(function.func, copies), *map(memory.of, function.args), **keywords)
    if isinstance(function, MethodType):
        return MethodType(function.__func__, memory.of(function.__self__))
    if not isinstance(function, FunctionType):
        return memory.of(function)
    if function.__code__.co_filename.startswith((TORCH, VARUNA)):
        return function
    return memory.function(function)


class _Memory:
    """Copies what functions remember: containers, tensors, plain objects, generators. Everything else is shared."""

    def __init__(self, copies: dict[int, Any]) -> None:
        self._memo = copies
        self._alive: list[Any] = []

    def of(self, value: Any) -> Any:
        """The copy of a value, or the value."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        is_kept = isinstance(value, (nn.Module, nn.Parameter, torch.optim.Optimizer, *_SHARED))
        if is_kept or (hasattr(value, "__len__") and not isinstance(value, Tensor) and len(value) > _MOST):
            return value
        self._alive.append(value)
        made: Any = value
        if isinstance(value, FunctionType) and value.__closure__:
            made = self.function(value)
        elif type(value) in (dict, list, set, deque, defaultdict):
            made = self._memo[id(value)] = copy.copy(value)
            made.clear()
            if isinstance(value, dict):
                made.update((self.of(key), self.of(each)) for key, each in value.items())
            else:
                made.extend(map(self.of, value)) if not isinstance(value, set) else made.update(map(self.of, value))
        elif isinstance(value, tuple) and type(value) is tuple:
            made = tuple(map(self.of, value))
        elif isinstance(value, Tensor):
            made = value.detach().clone()
        elif isinstance(value, torch.Generator):
            made = value.clone_state()
        elif _is_generator(value):
            made = copy.deepcopy(value)
        elif _remembers(value):
            made = self._memo[id(value)] = object.__new__(type(value))
            vars(made).update((name, self.of(each)) for name, each in vars(value).items())
        self._memo[id(value)] = made
        return made

    def function(self, value: FunctionType) -> FunctionType:
        """A copy of a function with cells and globals of its own, where it has any."""
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(CellType(self.of(cell.cell_contents)))
            except ValueError:  # a variable without a value yet
                cells.append(cell)
        names = {name for name in globals_of(value.__code__) if name in value.__globals__}
        own = {name: self.of(value.__globals__[name]) for name in names if not callable(value.__globals__[name])}
        is_same = not cells and all(value.__globals__[name] is each for name, each in own.items())
        if is_same and not _writes_globals(value.__code__):
            return value
        made = FunctionType(
            value.__code__, {**value.__globals__, **own}, value.__name__, value.__defaults__, tuple(cells) or None
        )
        made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, value.__qualname__
        self._memo[id(value)] = made
        return made


def _is_generator(value: Any) -> bool:
    return type(value).__module__ in ("random", "numpy.random._generator", "numpy.random.mtrand")


def _remembers(value: Any) -> bool:
    """Return whether a value is an object of the user's own, callable or not, that consists of its attributes."""
    kind = type(value)
    is_own = any(isinstance(vars(each).get("__call__"), FunctionType) for each in kind.__mro__)
    return is_plain_object(value) or (is_own and hasattr(value, "__dict__") and not isinstance(value, FunctionType))


def _writes_globals(code: CodeType) -> bool:
    own = any(each.opname == "STORE_GLOBAL" for each in dis.get_instructions(code))
    return own or any(_writes_globals(each) for each in code.co_consts if isinstance(each, CodeType))


def is_object(value: Any) -> bool:
    """Return whether an object consists of its attributes; an optimizer does."""
    return isinstance(value, torch.optim.Optimizer) or is_plain_object(value)
