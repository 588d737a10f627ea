"""Sections that call torch's own functions in place of the operators which a captured graph names.

Both run the same kernels. An operator is called through its schema, which takes a microsecond more than a function
whose arguments torch reads by generated code; a section of a transformer has 30 to 40 calls.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.cut.split import BATCH_SIZE

_aten: Any = torch.ops.aten
_functional = torch.nn.functional


class GpuLinks(NamedTuple):
    """The call that takes an operator's place."""

    call: Callable[..., Any] | str
    """a function, or the name of a method of the first argument"""
    most: int
    """so many positional arguments at most mean the same"""


DIRECT: dict[Any, GpuLinks] = {
    _aten.add.Tensor: GpuLinks(torch.add, 2),
    _aten.sub.Tensor: GpuLinks(torch.sub, 2),
    _aten.mul.Tensor: GpuLinks(torch.mul, 2),
    _aten.div.Tensor: GpuLinks(torch.div, 2),
    _aten.pow.Tensor_Scalar: GpuLinks(torch.pow, 2),
    _aten.neg.default: GpuLinks(torch.neg, 1),
    _aten.rsqrt.default: GpuLinks(torch.rsqrt, 1),
    _aten.tanh.default: GpuLinks(torch.tanh, 1),
    _aten.sigmoid.default: GpuLinks(torch.sigmoid, 1),
    _aten.relu.default: GpuLinks(torch.relu, 1),
    _aten.gelu.default: GpuLinks(_functional.gelu, 1),
    _aten.mean.dim: GpuLinks(torch.mean, 3),
    _aten.matmul.default: GpuLinks(torch.matmul, 2),
    _aten.bmm.default: GpuLinks(torch.bmm, 2),
    _aten.addmm.default: GpuLinks(torch.addmm, 3),
    _aten.embedding.default: GpuLinks(torch.embedding, 5),
    _aten.linear.default: GpuLinks(_functional.linear, 3),
    _aten.layer_norm.default: GpuLinks(torch.layer_norm, 6),
    _aten.scaled_dot_product_attention.default: GpuLinks(_functional.scaled_dot_product_attention, 6),
    _aten.dropout.default: GpuLinks(torch.dropout, 3),
    _aten.cat.default: GpuLinks(torch.cat, 2),
    _aten.transpose.int: GpuLinks(torch.transpose, 3),
    _aten.permute.default: GpuLinks(torch.permute, 2),
    _aten.unsqueeze.default: GpuLinks(torch.unsqueeze, 2),
    _aten.select.int: GpuLinks(torch.select, 3),
    _aten.reshape.default: GpuLinks(torch.reshape, 2),
    _aten.view.default: GpuLinks("view", 2),
    _aten.expand.default: GpuLinks("expand", 2),
    _aten.contiguous.default: GpuLinks("contiguous", 1),
    _aten.to.dtype: GpuLinks("to", 2),
}
"""By operator; none draws or writes to its arguments in another way than the operator."""

_made: WeakKeyDictionary[GraphModule, GraphModule] = WeakKeyDictionary()


def direct(module: GraphModule) -> GraphModule:
    """Return a section's graph that computes the same with direct calls; one for each graph and process."""
    if module not in _made:
        graph, copies = Graph(), dict[Node, Node]()
        for node in module.graph.nodes:
            copy = copies[node] = graph.node_copy(node, lambda source: copies[source])
            found = DIRECT.get(node.target) if node.op == "call_function" else None
            if found is not None and _means_the_same(node, found):
                copy.target = found.call
                if isinstance(found.call, str):
                    copy.op = "call_method"
        _made[module] = GraphModule(module, graph, class_name=f"{type(module).__name__}Direct")
    return _made[module]


def _means_the_same(node: Node, found: GpuLinks) -> bool:
    """Whether its arguments are such that torch reads them as the operator's schema does."""
    if len(node.args) > found.most or "self" in node.kwargs:
        return False
    first = node.args[0] if node.args else None
    return isinstance(first, list | tuple) or (isinstance(first, Node) and _is_tensor(first))


def _is_tensor(node: Node) -> bool:
    is_placeholder = node.op == "placeholder" and node.target != BATCH_SIZE
    return is_placeholder or isinstance(node.meta.get("val"), Tensor)
