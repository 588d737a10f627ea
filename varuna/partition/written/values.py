"""The values that a model is made of, as JSON with tensors aside, and back."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from varuna.core.model import ModelFacts
from varuna.partition.written.graphs import CannotShareError, dtype_of, graph_of, graph_values

_KIND, _OF = "kind", "of"
_ENUMS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.memory_format | torch.layout)}


class _Form(NamedTuple):
    """The written form of values of a type."""

    kind: str
    type: Any
    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]


_LEAVES = (
    _Form("complex", complex, lambda value: [value.real, value.imag], lambda of: complex(*of)),
    _Form("dtype", torch.dtype, lambda value: str(value).removeprefix("torch."), dtype_of),
    _Form("device", torch.device, str, torch.device),
    _Form("enum", torch.memory_format | torch.layout, str, lambda of: _ENUMS[of]),
    _Form("facts", ModelFacts, lambda value: value.model_dump(mode="json"), ModelFacts.model_validate),
)
_HOLDERS = (
    _Form("list", list, tuple, list),
    _Form("dict", Mapping, lambda value: tuple(value.items()), dict),
    _Form("frozenset", frozenset, lambda value: tuple(sorted(value)), frozenset),  # equal models give equal bytes
    _Form("slice", slice, lambda value: (value.start, value.stop, value.step), lambda of: slice(*of)),
)
_FORMS = {form.kind: form for form in (*_LEAVES, *_HOLDERS)}


class ValueWriter:
    """Writes values of known types.

    Args:
        types: dataclasses and named tuples that may occur.
    """

    def __init__(self, types: Iterable[type]) -> None:
        self._types = frozenset(types)
        self.tensors: dict[str, Tensor] = {}
        """by the names that the JSON has for them"""

    def write(self, value: Any) -> Any:
        """A value as JSON.

        Raises:
            CannotShareError: it is, or holds, something else.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (tuple, torch.Size):
            return [self.write(each) for each in value]
        if kind in self._types:
            names = getattr(value, "_fields", None) or [each.name for each in dataclasses.fields(value)]
            return _tagged(kind.__name__, [self.write(getattr(value, name)) for name in names])
        return self._special(value)

    def _special(self, value: Any) -> Any:
        if isinstance(value, Node):
            return _tagged("node", value.name)
        if isinstance(value, GraphModule):
            return _tagged("graph", graph_values(value, self.write))
        if isinstance(value, Tensor):
            name = str(len(self.tensors))
            self.tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return _tagged("tensor", name)
        for form in _LEAVES:
            if isinstance(value, form.type):
                return _tagged(form.kind, form.take_apart(value))
        for form in _HOLDERS:
            if isinstance(value, form.type):
                return _tagged(form.kind, self.write(form.take_apart(value)))
        raise CannotShareError(f"a {type(value).__name__} means nothing to another process")


class ValueReader:
    """Reads what a ``ValueWriter`` wrote.

    Args:
        types: those of the writer.
        tensors: its tensors.
    """

    def __init__(self, types: Iterable[type], tensors: Mapping[str, Tensor]) -> None:
        self._types: Mapping[str, Callable[..., Any]] = {each.__name__: each for each in types}
        self._tensors = tensors

    def read(self, written: Any, nodes: Mapping[str, Node] | None = None) -> Any:
        """Inverse of ``ValueWriter.write``.

        Args:
            written: its JSON.
            nodes: of the graph in which it is an argument.

        Raises:
            CannotShareError: no writer wrote this, or it is of another version.
        """
        if isinstance(written, list):
            return tuple([self.read(each, nodes) for each in written])
        if not isinstance(written, dict):
            return written
        kind, of = written[_KIND], written[_OF]
        if kind == "node":
            return (nodes or {})[of]
        if kind in self._types:
            return self._types[kind](*[self.read(each, nodes) for each in of])
        if kind == "graph":
            return graph_of(of, self.read)
        if kind == "tensor":
            return self._tensors[of]
        form = _FORMS[kind]
        return form.put_together(of if form in _LEAVES else self.read(of, nodes))


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {_KIND: kind, _OF: of}
