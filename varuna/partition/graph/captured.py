"""The capture of a model: one flat graph, with the names of everything that flows into it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.data.sizes import OpenSizes
from varuna.partition.graph.ranges import Range
from varuna.partition.graph.sample_guards import Conditions


class Truth(NamedTuple):
    """An assumption that a branch of forward() makes about activations."""

    node: torch.fx.Node
    """true where it goes as it was captured: a tensor of one element, which no other node uses"""
    place: str
    """file and line of the branch"""


@dataclass(frozen=True)
class TensorKind:
    """A parameter or buffer without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = False


@dataclass(frozen=True)
class Capture:
    """A flat training graph with the names of everything that flows into it.

    ``graph`` returns ``(loss, *metric sums)``. Placeholders are keyed by node name.
    """

    graph: torch.fx.Graph
    owner: torch.fx.GraphModule
    parameters: dict[str, str]
    """placeholder -> the model's own name of the parameter (the first, for a tied one)"""
    trainable: frozenset[str]
    aliases: dict[str, str]
    """every further name of a tied parameter or buffer -> its first name"""
    buffers: dict[str, str]
    """placeholder -> the model's own name of the buffer (the first, for one that modules share)"""
    constants: dict[str, Tensor]
    inputs: dict[str, str]
    """placeholder -> key of the batch"""
    batch_symbol: Any
    """sympy symbol of the batch dimension; None where the sizes of a batch are open"""
    sizes: OpenSizes | None
    """those of a batch that are open"""
    open_symbols: Mapping[Any, tuple[str, int]]
    """sympy symbol of each of them, in their order -> placeholder of an input, and its dimension that has the size"""
    metrics: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    """parameter -> shape"""
    kinds: tuple[Mapping[str, TensorKind], Mapping[str, TensorKind]]
    """of all parameters and all buffers of the model, by first name"""
    pairs: frozenset[str]
    """complex parameters"""
    dtypes: dict[str, torch.dtype]
    """parameter -> dtype, where that is bf16 or fp16"""
    packed: dict[str, torch.dtype]
    """parameter -> dtype, where that holds whole numbers, as quantized ones do"""
    visits_all: bool
    """loops over the places where a mask is true were captured for every place"""
    conditions: Conditions | None
    """conditions on samples under which the branches of forward() went this way"""
    ranges: tuple[Range, ...]
    """ranges of the whole numbers in samples that its embeddings and losses can take"""
    truths: tuple[Truth, ...]
    """conditions on activations, and the ways that their branches went"""
    eager: Mapping[str, str]
    """path of a module that runs as written, as one operation -> why"""
    sources: str
    """hash of the code that it was captured from"""

    @property
    def condition_inputs(self) -> tuple[str, ...]:
        """Keys of the batch that the conditions read."""
        return () if self.conditions is None else self.conditions.inputs
