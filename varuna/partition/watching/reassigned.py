"""Buffers that forward() replaces, as in ``self.center = self.center * 0.9``: the new value is written in place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def buffers_written_in_place(model: nn.Module) -> Iterator[None]:
    """Write the new value of a buffer that was replaced by one like it into the buffer, after this block.

    Others, such as a table that grows with the longest sequence so far, are no state of a run: what comes after a step
    would have to have its shape.
    """
    before = [(each, name, value) for each in model.modules() for name, value in each._buffers.items()]
    yield
    for module, name, value in before:
        new = module._buffers.get(name)
        if new is not value and value is not None and new is not None and _alike(value, new):
            with torch.no_grad():
                value.copy_(new.detach())
            module._buffers[name] = value


def _alike(value: Tensor, new: Tensor) -> bool:
    fixed = all(isinstance(size, int) for size in new.shape)
    return fixed and new.shape == value.shape and new.dtype is value.dtype and new.device == value.device
