"""Buffers that forward() replaces, as in ``self.center = self.center * 0.9``: the new value is written in place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from varuna.core.errors import ModelError


@contextmanager
def buffers_written_in_place(model: nn.Module) -> Iterator[None]:
    """After this block every buffer is the tensor that it was, with the value of what has taken its place.

    Raises:
        ModelError: that has another shape or dtype.
    """
    before = [(each, name, value) for each in model.modules() for name, value in each._buffers.items()]
    yield
    for module, name, value in before:
        new = module._buffers.get(name)
        if new is value or value is None:
            continue
        if not isinstance(new, Tensor) or new.dtype is not value.dtype or new.dim() != value.dim():
            raise ModelError(_unlike(name, type(module).__name__, value, new))
        if any(isinstance(size, int) and size != old for size, old in zip(new.shape, value.shape, strict=True)):
            raise ModelError(_unlike(name, type(module).__name__, value, new))
        with torch.no_grad():
            value.copy_(new.detach())
        module._buffers[name] = value


def _unlike(name: str, kind: str, value: Tensor, new: object) -> str:
    found = f"{new.dtype} of shape {tuple(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
    return (
        f"forward() replaces the buffer {name} of {kind}, {value.dtype} of shape {tuple(value.shape)}, by {found}. Its "
        "shape and dtype are part of a run's state, which workers exchange: keep them as they are registered."
    )
