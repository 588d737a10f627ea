"""A model that is nothing but its layers, one after another, and rows of numbers to put through it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    """Each of the layers gets what the one before it returned; the loss is the mean of what comes out."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Rows:
    """Rows of ``width`` equal numbers, a function of the index."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((self.width,), float(index % 7))}
