"""Python that export would not follow: branches on sizes that depend on data, ``len(x)``, caches, comparisons."""

import builtins
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

from varuna.partition.watching.own_code import TORCH

_evaluate = ShapeEnv.evaluate_expr
_len = builtins.len
_attempts = itertools.count(1)


@contextmanager
def general_sizes() -> Iterator[None]:
    """Where export cannot know a size, a branch takes it for neither 0 nor 1.

    ``if n == 0: continue`` then always runs the general path, which does the same with nothing to do. Other
    conditions on data stay refused.
    """

    def evaluate(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        try:
            return _evaluate(self, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            expression, hint, node = (*args, *kwargs.values())[:3]
            return _evaluate(self, expression, hint, node, size_oblivious=True)

    ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = _evaluate  # type: ignore[method-assign]


@contextmanager
def general_lengths() -> Iterator[None]:
    """``len(x)`` of a tensor is ``x.shape[0]``, which may be the number of samples: Python makes one number of it.

    A loop (``range(len(x))``) needs one number all the same.
    """

    def length(value: Any, /) -> Any:
        is_plain = isinstance(value, Tensor) and type(value).__len__ is Tensor.__len__ and value.dim() > 0
        return value.shape[0] if is_plain else _len(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = _len


@contextmanager
def hashed_sizes() -> Iterator[None]:
    """Let symbolic sizes be keys in the user's code (``functools.lru_cache``), which export does not allow.

    What is kept under it belongs to one attempt to export: no other one finds it.
    """
    original, attempt = torch.SymInt.__hash__, next(_attempts)

    def hashed(size: torch.SymInt) -> int:
        is_torchs = sys._getframe(1).f_code.co_filename.startswith(TORCH)
        return original(size) if is_torchs else hash((attempt, str(size.node.expr)))

    torch.SymInt.__hash__ = hashed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.SymInt.__hash__ = original  # type: ignore[method-assign]


class Comparing(TorchFunctionMode):
    """``torch.equal`` and ``torch.allclose`` as the tensor operations that they are: their answer can be followed."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        given = dict(kwargs or {})
        if func in (torch.equal, Tensor.equal) and len(args) == 2 and args[0].dtype is args[1].dtype:
            one, other = args
            return one.shape == other.shape and bool((one == other).all())
        if func in (torch.allclose, Tensor.allclose):
            return bool(torch.isclose(*args, **given).all())
        return func(*args, **given)
