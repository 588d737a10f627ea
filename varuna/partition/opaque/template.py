"""A module without its parameters and buffers: copied and given some for each call, and checked afterwards.

A copy for each call, since several sections (and ranks that are threads) call one module with leaves of their own, and
since a module may call parts of itself once more in the backward (gradient checkpointing).
"""

import copy
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_TABLES = ("_parameters", "_buffers", "_modules")
_RUN_AND_CHECKED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class UnfitError(Exception):
    """A module cannot be one operation; the one that calls it may."""


@dataclass(frozen=True)
class Template:
    """A module whose parameters and buffers are empty places."""

    module: nn.Module
    places: tuple[Tensor, ...]
    """each once, in the order of ``named_parameters`` and ``named_buffers``"""
    names: tuple[str, ...]
    """of the places, within the module"""
    fingerprint: str
    """of what the module computes, as far as its configuration and code tell; the same in every process"""

    def holding(self, values: Sequence[Tensor]) -> nn.Module:
        """A copy with ``values`` in place of parameters and buffers; other tensors are shared, not copied."""
        # deepcopy takes what the memo has for an id: values for places, and tensors themselves where they are shared
        memo: dict[int, Any] = {id(tensor): tensor for _, tensor in plain_tensors(self.module)}
        memo.update({id(place): value for place, value in zip(self.places, values, strict=True)})
        return copy.deepcopy(self.module, memo)


def template_of(module: nn.Module, rebuilt: Callable[[], nn.Module]) -> Template:
    """The template of a module that is being captured.

    Args:
        module: its parameters and buffers may be fakes.
        rebuilt: the same module with values, for what its constructor computes and keeps in plain attributes.

    Raises:
        UnfitError: it cannot be copied.
    """
    template = _emptied(module)
    if _has_unknown(template.module):
        template = _emptied(rebuilt())
    return template


def _emptied(module: nn.Module) -> Template:
    if any(isinstance(each, torch.jit.ScriptModule) and list(each.parameters()) for each in module.modules()):
        raise UnfitError("a scripted module has its own parameters")
    held, names = state_of(module)
    places = [
        nn.Parameter(torch.empty(0), requires_grad=False) if isinstance(value, nn.Parameter) else torch.empty(0)
        for value in held
    ]
    memo: dict[int, Any] = {id(value): place for value, place in zip(held, places, strict=True)}
    for _, value in plain_tensors(module):
        if isinstance(value, FakeTensor):
            memo.setdefault(id(value), torch.empty(0, device="meta"))
    for each in module.modules():  # recurrent layers list their weights once more, and keep the list up to date
        if isinstance(each, nn.RNNBase):
            for weight in each._flat_weights:
                memo.setdefault(id(weight), torch.empty(0))
    try:
        empty = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnfitError(f"it cannot be copied: {error}") from error
    for each in empty.modules():
        if isinstance(each, nn.RNNBase):
            object.__setattr__(each, "flatten_parameters", _nothing)  # it would move the leaves to other memory
            each._init_flat_weights()
    return Template(empty, tuple(places), names, _fingerprint(empty, names))


def _fingerprint(empty: nn.Module, names: Sequence[str]) -> str:
    parts: list[Any] = [names]
    for name, module in empty.named_modules():
        kind = type(module)
        parts.append((name, kind.__module__, kind.__qualname__, _source(kind), module.training))
        parts.append([(key, _described(value)) for key, value in sorted(vars(module).items()) if key not in _TABLES])
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _nothing() -> None:
    pass


def state_of(module: nn.Module) -> tuple[list[Tensor], tuple[str, ...]]:
    """Parameters and buffers, each once, with the first of their names."""
    found: dict[int, tuple[Tensor, str]] = {}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        found.setdefault(id(value), (value, name))
    return [value for value, _ in found.values()], tuple(name for _, name in found.values())


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes that are neither parameters nor buffers, with the attribute."""
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if name not in _TABLES and not (name == "_flat_weights" and isinstance(each, nn.RNNBase)):
                yield from ((f"{path}.{name}".strip("."), tensor) for tensor in _tensors_in(value))


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors_in(each)


def _has_unknown(module: nn.Module) -> bool:
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for _, tensor in plain_tensors(module))


def same_attributes(one: nn.Module, other: nn.Module) -> str | None:
    """The first attribute whose tensors differ between two builds of a module; None if they agree."""
    pairs = zip(plain_tensors(one), plain_tensors(other), strict=True)
    return next((name for (name, a), (_, b) in pairs if not _equal(a, b)), None)


def _source(kind: type) -> str:
    """Code of a module's class, if it is not torch's own."""
    if kind.__module__.partition(".")[0] == "torch":
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _described(value: object) -> object:
    """An attribute as text, without what differs between processes."""
    if isinstance(value, _RUN_AND_CHECKED):
        return repr(value)
    if isinstance(value, Tensor):
        shape = str(value.dtype), tuple(value.shape)
        if value.is_meta or isinstance(value, FakeTensor) or not value.numel():
            return shape
        flat = value.detach().cpu().contiguous().reshape(-1)
        return *shape, hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return [(_described(key), _described(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return type(value).__qualname__


# -- what a call writes ---------------------------------------------------------------------------------------------


class Marks:
    """The contents of a module before a call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        tensors = [*(value for _, value in plain_tensors(module)), *module.parameters(), *module.buffers()]
        self._versions = [(value, value._version) for value in tensors]
        self._held = {path: _snapshot(each) for path, each in module.named_modules()}

    def written(self) -> dict[str, bool]:
        """Parameters, buffers and attributes that are others now -> whether there was something before."""
        found: dict[str, bool] = {}
        for path, each in self._module.named_modules():
            before, now = self._held.get(path, {}), _snapshot(each)
            for name in dict.fromkeys((*before, *now)):
                if name not in before or name not in now or not _same(before[name], now[name]):
                    found[f"{path}.{name.partition('/')[2]}".strip(".")] = before.get(name) is not None
        named = (*self._module.named_parameters(), *self._module.named_buffers(), *plain_tensors(self._module))
        for value, version in self._versions:
            if value._version != version:
                found[next((name for name, each in named if each is value), "a tensor")] = True
        return found


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Every attribute by table and name, containers copied."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in _TABLES:
            found.update({f"{name}/{key}": entry for key, entry in value.items()})
        elif not (name == "_flat_weight_refs" and isinstance(module, nn.RNNBase)):
            found[f"/{name}"] = _container(value)
    return found


def _container(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _container(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_container(each) for each in value]
    return value


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, Tensor) or isinstance(now, Tensor) or isinstance(before, nn.Module):
        return False
    if isinstance(before, weakref.ref) and isinstance(now, weakref.ref):
        return before() is now()
    if type(before) is not type(now):
        return False
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(each, now[key]) for key, each in before.items())
    if isinstance(before, list):
        return len(before) == len(now) and all(map(_same, before, now))
    return bool(before == now)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
