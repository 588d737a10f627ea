"""Loss terms with several divisors: each is divided by its count of the whole batch, which every micro-batch is given.

A loss is then a sum over micro-batches, term by term: its counts cannot be made good for afterwards, since gradients of
all terms add up in one backward. Counts follow from inputs, so they are known before the first forward that needs them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from varuna.data.sizes import PREFIX
from varuna.partition.cut.split import SectionGraph

SHARE = f"{PREFIX}share"
"""Key of the micro-batch's part of the batch's examples, which scales what does not depend on the micro-batch."""


@dataclass(frozen=True)
class Leaf:
    """Numbers that add up over micro-batches."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_example: int | None = None
    """elements per example, if the number is known without looking; None: counted from the inputs"""

    @property
    def width(self) -> int:
        """Number of numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Whole:
    """Numbers of the whole batch that one graph's loss needs, and how to count them."""

    keys: tuple[str, ...]
    """of the numbers, in the order of ``finish``'s results"""
    dtypes: tuple[torch.dtype, ...]
    leaves: tuple[Leaf, ...]
    counter: SectionGraph | None
    """counts those leaves that follow from inputs, in their order"""
    finish: GraphModule
    """all leaves of the whole batch, then ``fixed`` -> its numbers"""
    fixed: tuple[str, ...]
    """names of buffers and constants"""
    buffers: tuple[str, ...]
    """those that it needs"""

    @property
    def width(self) -> int:
        """Number of numbers in a micro-batch's count."""
        return sum(leaf.width for leaf in self.leaves)

    def counts(self, batch: Mapping[str, Tensor], known: Mapping[str, Tensor], size: int) -> list[float]:
        """Count one micro-batch; of no examples, nothing.

        Args:
            batch: its samples.
            known: buffers and constants, in host memory.
            size: examples.
        """
        if not size:
            return [0.0] * self.width
        counted: list[Tensor] = []
        if self.counter is not None:
            sizes = [size] if self.counter.needs_batch_size else []
            fixed = [known[name] for name in (*self.counter.buffers, *self.counter.constants)]
            with torch.no_grad():
                counted = list(self.counter.module(*[batch[key] for key in self.counter.inputs], *sizes, *fixed))
        found: list[float] = []
        for leaf in self.leaves:
            if leaf.per_example is not None:
                found.append(float(leaf.per_example * size))
            else:
                # float64: whole numbers below 2**53 add up exactly, in any order of micro-batches and replicas
                found.extend(counted.pop(0).to(torch.float64).reshape(-1).tolist())
        return found

    def numbers(self, totals: Sequence[float], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Numbers of the whole batch, from its counts."""
        values: list[Any] = []
        rest = list(totals)
        for leaf in self.leaves:
            mine, rest = rest[: leaf.width], rest[leaf.width :]
            exact = torch.tensor(mine, dtype=torch.float64).reshape(leaf.shape)
            values.append(int(mine[0]) if leaf.per_example is not None else exact.to(leaf.dtype))
        with torch.no_grad():
            made = self.finish(*values, *[known[name] for name in self.fixed])
        return {
            key: torch.as_tensor(value).to(dtype)
            for key, dtype, value in zip(self.keys, self.dtypes, made, strict=True)
        }
