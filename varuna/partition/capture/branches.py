"""Python that export would not follow: branches on sizes that depend on data, and comparisons."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

_evaluate = ShapeEnv.evaluate_expr


@contextmanager
def general_sizes() -> Iterator[None]:
    """Take each size that export cannot know for neither 0 nor 1 in branches.

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
