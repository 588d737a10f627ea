"""Smaller models where no argument makes them so: narrower layers, and what a builder passes to its class."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch import nn

from tests.field.shrink import DEPTH, shrunk

_LEAST = 8
"""Widths below are kept: colours, classes."""
_GROUPS = 8
"""Place of this argument of a convolution."""
_SIZES = {"image_size", "input_size", "spatial_size"}


@contextmanager
def narrow(part: int) -> Iterator[None]:
    """Linear, convolutional and normalising layers that are built within have so many times fewer channels.

    What is a sum, a product or a concatenation of channels stays one, since all widths are divided. Models that keep
    widths elsewhere, too, fail in their first forward.
    """
    layers: tuple[tuple[type[nn.Module], int], ...] = (
        (nn.Linear, 2),
        (nn.modules.conv._ConvNd, 2),
        (nn.modules.batchnorm._NormBase, 1),
        (nn.LayerNorm, 1),
    )
    with ExitStack() as stack:
        for kind, widths in layers:
            stack.enter_context(mock.patch.object(kind, "__init__", _divided(kind.__init__, widths, part)))
        yield


def _divided(init: Callable[..., None], widths: int, part: int) -> Callable[..., None]:
    names = ("in_features", "out_features", "num_features", "normalized_shape")

    @wraps(init)
    def narrowed(self: nn.Module, *given: Any, **named: Any) -> None:
        fewer = [_fewer(value, part) if place < widths else value for place, value in enumerate(given)]
        if isinstance(self, nn.modules.conv._ConvNd) and given[_GROUPS] == given[0]:
            fewer[_GROUPS] = fewer[0]  # one for each channel
        init(self, *fewer, **{name: _fewer(value, part) if name in names else value for name, value in named.items()})

    return narrowed


def _fewer(value: Any, part: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_fewer(each, part) for each in value)
    return value // part if isinstance(value, int) and value >= _LEAST and value % part == 0 else value


@contextmanager
def smaller(kind: type[nn.Module], side: int, frames: int) -> Iterator[None]:
    """Shrink what a builder passes to this class, for pictures of this side."""
    init = kind.__init__
    signature = inspect.signature(init)

    def small(name: str, value: Any) -> Any:
        if name in _SIZES:
            return side if isinstance(value, int) else (side, side)
        if name == "temporal_size":
            return frames
        if name.endswith("_setting") and isinstance(value, list):
            return value[:DEPTH]
        return shrunk(name, value)

    @wraps(init)
    def made(self: nn.Module, *given: Any, **named: Any) -> None:
        bound = signature.bind(self, *given, **named)
        for name, value in bound.arguments.items():
            if name != "self":
                bound.arguments[name] = small(name, value)
        init(*bound.args, **bound.kwargs)

    with mock.patch.object(kind, "__init__", made):
        yield
