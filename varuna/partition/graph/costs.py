"""Costs of ops as a deterministic function of the graph: FLOPs and bytes under a fixed roofline.

Sections must never differ between machines or runs, so nothing here is measured.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from varuna.partition.graph.operations import op_name
from varuna.partition.opaque.calls import call_of

ROOFLINE_FLOPS_PER_S = 15e12
"""Nominal device: about a V100 in fp32. Only the ratio to the bandwidth matters for cut-points."""
ROOFLINE_BYTES_PER_S = 0.9e12
CPU_SLOWDOWN = 300.0
"""A nominal CPU worker (50 GFLOP/s, 3 GB/s): what the first planner assumes where there is no GPU."""


@dataclass(frozen=True)
class Cost:
    """Forward cost of one op, per example."""

    forward_s: float
    output_bytes: int


class Sizes:
    """Evaluates symbolic shapes at a given batch size."""

    def __init__(
        self, batch_symbol: Any, per_sample: Mapping[Any, float] | None = None, samples: int | None = None
    ) -> None:
        """Prepare.

        Args:
            batch_symbol: of the batch dimension, if there is one.
            per_sample: open sizes, and how much of each a sample adds: shapes of a batch are then estimates.
            samples: of every batch, where that is fixed.
        """
        self._symbol, self._samples = batch_symbol, samples
        self._per_sample = dict(per_sample or {})
        self.open_symbols = tuple(self._per_sample)
        self._at = lru_cache(maxsize=None)(self._evaluate)

    def _evaluate(self, expression: Any, batch: int) -> int:
        known = expression.subs({self._symbol: batch}) if self._symbol is not None else expression
        samples = batch if self._samples is None else self._samples
        known = known.subs({symbol: max(1, round(each * samples)) for symbol, each in self._per_sample.items()})
        # a size that depends on data (tokens of an expert) is unknown: one per example is a guess for costs alone
        return int(known.subs(dict.fromkeys(known.free_symbols, batch)))

    def depends_on_data(self, value: Tensor) -> bool:
        """Return whether a dimension depends on data."""
        sizes: tuple[object, ...] = tuple(value.shape)
        known = {self._symbol, *self._per_sample}
        return any(not size.node.expr.free_symbols <= known for size in sizes if isinstance(size, torch.SymInt))

    def dimension(self, size: object, batch: int) -> int:
        """One dimension, an int or a ``SymInt``."""
        return self._at(size.node.expr, batch) if isinstance(size, torch.SymInt) else int(size)  # type: ignore[call-overload]

    def shape(self, value: Tensor, batch: int) -> tuple[int, ...]:
        """Concrete shape at ``batch`` examples."""
        return tuple(self.dimension(size, batch) for size in value.shape)

    def numel(self, value: Tensor, batch: int) -> int:
        """Elements at ``batch`` examples."""
        return math.prod(self.shape(value, batch))

    def size_bytes(self, value: Tensor, batch: int) -> int:
        """Bytes at ``batch`` examples."""
        return self.numel(value, batch) * value.element_size()


def tensors_of(node: Node) -> list[Tensor]:
    """Tensors that a node produces, by its captured meta data."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [part for part in value if isinstance(part, Tensor)] if isinstance(value, list | tuple) else []


def is_view(node: Node) -> bool:
    """Return whether the node's output shares its storage with an argument (nothing is computed or stored)."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns) or op_name(
        node
    ) in ("aten::reshape", "aten::contiguous", "aten::_unsafe_view")


def cost_of(node: Node, sizes: Sizes) -> Cost:
    """Forward seconds (roofline: the slower of compute and memory) and output bytes of one op."""
    if node.op != "call_function" or is_view(node):
        return Cost(0.0, 0)
    outputs = sum(sizes.size_bytes(value, 1) for value in tensors_of(node))
    inputs = sum(sizes.size_bytes(value, 1) for source in node.all_input_nodes for value in tensors_of(source))
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return Cost((inputs + outputs) / ROOFLINE_BYTES_PER_S, outputs)
    call = call_of(node.target)
    if call is not None and call.learned is not None:
        return Cost(call.learned.forward_s, outputs)
    flops = _flops(node, sizes)
    return Cost(max(flops / ROOFLINE_FLOPS_PER_S, (inputs + outputs) / ROOFLINE_BYTES_PER_S), outputs)


def _flops(node: Node, sizes: Sizes) -> float:
    """FLOPs: 2 per multiply-add of matrix products, convolutions and attention; other ops are bound by memory."""
    name = op_name(node).removeprefix("aten::")
    operands = [argument.meta["val"] for argument in node.args if isinstance(argument, Node) and "val" in argument.meta]
    shapes = [sizes.shape(value, 1) for value in operands if isinstance(value, Tensor)]
    out = sum(sizes.numel(value, 1) for value in tensors_of(node))
    if name in ("linear", "matmul", "mm", "bmm", "mv") and shapes and shapes[0]:
        return 2.0 * out * shapes[0][-1]
    if name in ("addmm", "baddbmm", "addbmm") and len(shapes) > 1:
        # operand 0 is added; 1 and 2 are multiplied
        return 2.0 * out * shapes[1][-1]
    if name == "scaled_dot_product_attention" and len(shapes) > 2:
        query, key, value = shapes[:3]
        # q k^T over E for each pair [..., L, S], then times v over S for each of [..., L, Ev]
        return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if name.startswith(("conv", "convolution")) and len(shapes) > 1:
        # weight [out, in / groups, *kernel]: multiply-adds for one element of the result
        return 2.0 * out * math.prod(shapes[1][1:])
    if name == "einsum":
        return _einsum_flops(node, sizes)
    return 0.0


def _einsum_flops(node: Node, sizes: Sizes) -> float:
    """FLOPs from the product of the sizes of all indices, which is exact for a contraction of two operands."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, Sequence):
        return 0.0
    extent: dict[str, int] = {}
    for term, operand in zip(equation.split("->")[0].split(","), operands, strict=False):
        if isinstance(operand, Node) and isinstance(operand.meta.get("val"), Tensor):
            shape = sizes.shape(operand.meta["val"], 1)
            extent.update(zip(term.strip().replace(".", ""), shape[-len(term.strip()) :], strict=False))
    return 2.0 * math.prod(extent.values())
