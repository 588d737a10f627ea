"""Parameters that stand in for real ones: how long an op takes does not depend on values, and no model is built."""

from collections.abc import Iterable, Mapping, Set
from zlib import crc32

import torch
from torch import Tensor

from varuna.partition.initial.constructor import Initial
from varuna.partition.initial.initial_values import Check, InitialParameters

_DRAWN = 2**20
"""Numbers drawn for a parameter, at most: drawing those of a large model would take longer than timing it."""


class StandIns:
    """An ``InitialParameters`` of made-up parameters; buffers (masks, rotary tables) are the model's own."""

    name = "stand-ins"
    stored: Set[str] = frozenset()

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], real: InitialParameters) -> None:
        """Take the place of ``real``, whose parameters are never asked for."""
        self._shapes, self._real = shapes, real

    def parameters(self, names: Iterable[str], check: Check | None = None) -> dict[str, Tensor]:
        """Small random numbers, repeated in large ones; around 1 where there is one dimension, as in norms."""
        found = {}
        for name in names:
            shape = torch.Size(self._shapes[name])
            generator = torch.Generator().manual_seed(crc32(name.encode()))  # the same on all workers
            drawn = torch.randn(min(shape.numel(), _DRAWN), generator=generator).mul_(0.02)
            value = drawn.repeat(-(-shape.numel() // max(1, len(drawn))))[: shape.numel()].view(shape)
            found[name] = value.add_(1.0) if value.dim() == 1 else value
        return found

    def buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The model's own buffers."""
        return self._real.buffers(names)

    def whole_model(self) -> Initial:
        """The real model."""
        return self._real.whole_model()
