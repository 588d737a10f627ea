"""Attributes of parameters, which a model's constructor sets and an optimizer's function reads, on every copy of them.

Mamba marks what is not decayed (``p._no_weight_decay = True``), S4 says options (``p._optim``), muP shapes
(``p.infshape``); a class of one's own is a mark, too.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from varuna.partition.optimizers import NamedParameters, OptimizerFactory


class ParameterMark(NamedTuple):
    """The attributes and the class of a parameter."""

    kind: type[nn.Parameter]
    attributes: Mapping[str, Any]


ParameterMarks = dict[str, ParameterMark]
"""By parameter; those without any are left out."""


def marks_of(module: nn.Module) -> ParameterMarks:
    """Return the marks of a module's parameters; tensors without values are left out."""
    found = {name: mark_of(parameter) for name, parameter in module.named_parameters()}
    return {name: mark for name, mark in found.items() if mark.attributes or mark.kind is not nn.Parameter}


def mark_of(parameter: nn.Parameter) -> ParameterMark:
    """The mark of one parameter."""
    known = vars(nn.Parameter(torch.empty_like(parameter), False)) if isinstance(parameter, FakeTensor) else {}
    attributes = {
        name: value
        for name, value in vars(parameter).items()
        if name not in known and not (isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor)))
    }
    return ParameterMark(type(parameter) if _is_harmless(type(parameter)) else nn.Parameter, attributes)


def put_mark(parameter: Tensor, mark: ParameterMark) -> None:
    """Give a parameter a mark, which it shares with others of its name."""
    vars(parameter).update(mark.attributes)
    if mark.kind is not nn.Parameter and type(parameter) is nn.Parameter:
        parameter.__class__ = mark.kind


def put_marks(named: Iterable[tuple[str, nn.Parameter]], marks: ParameterMarks) -> None:
    """Give parameters their marks."""
    for name, parameter in named:
        if name in marks:
            put_mark(parameter, marks[name])


class Marked:
    """The user's ``optimizer=``, whose parameters have the marks of the model's."""

    def __init__(self, factory: OptimizerFactory, marks: ParameterMarks) -> None:
        """Mark what ``factory`` is given; the marks may be filled in later."""
        functools.update_wrapper(self, factory)
        self._factory, self._marks = factory, marks

    def __call__(self, named: NamedParameters) -> Any:
        """Call the user's function."""
        put_marks(named, self._marks)
        return self._factory(named)


def _is_harmless(kind: type) -> bool:
    """Return whether a class of parameters differs from torch's in Python only."""
    own = issubclass(kind, nn.Parameter) and not kind.__module__.startswith("torch.")
    plain: Any = nn.Parameter
    given: Any = kind
    return own and all(
        getattr(given, name).__func__ is getattr(plain, name).__func__
        for name in ("__torch_function__", "__torch_dispatch__")
        if hasattr(getattr(plain, name), "__func__")
    )
