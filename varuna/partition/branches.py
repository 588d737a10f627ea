"""Python branches on sizes that depend on data, such as the number of tokens that an expert got."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

_evaluate = ShapeEnv.evaluate_expr


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
