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


class Direct(NamedTuple):
    """What is called in an operator's place."""

    call: Callable[..., Any] | str
    """a function, or the name of a method of the first argument"""
    most: int
    """so many positional arguments at most mean the same"""


DIRECT: dict[Any, Direct] = {
    _aten.add.Tensor: Direct(torch.add, 2),
    _aten.sub.Tensor: Direct(torch.sub, 2),
    _aten.mul.Tensor: Direct(torch.mul, 2),
    _aten.div.Tensor: Direct(torch.div, 2),
    _aten.pow.Tensor_Scalar: Direct(torch.pow, 2),
    _aten.neg.default: Direct(torch.neg, 1),
    _aten.rsqrt.default: Direct(torch.rsqrt, 1),
    _aten.tanh.default: Direct(torch.tanh, 1),
    _aten.sigmoid.default: Direct(torch.sigmoid, 1),
    _aten.relu.default: Direct(torch.relu, 1),
    _aten.gelu.default: Direct(_functional.gelu, 1),
    _aten.mean.dim: Direct(torch.mean, 3),
    _aten.matmul.default: Direct(torch.matmul, 2),
    _aten.bmm.default: Direct(torch.bmm, 2),
    _aten.addmm.default: Direct(torch.addmm, 3),
    _aten.embedding.default: Direct(torch.embedding, 5),
    _aten.linear.default: Direct(_functional.linear, 3),
    _aten.layer_norm.default: Direct(torch.layer_norm, 6),
    _aten.scaled_dot_product_attention.default: Direct(_functional.scaled_dot_product_attention, 6),
    _aten.dropout.default: Direct(torch.dropout, 3),
    _aten.cat.default: Direct(torch.cat, 2),
    _aten.transpose.int: Direct(torch.transpose, 3),
    _aten.permute.default: Direct(torch.permute, 2),
    _aten.unsqueeze.default: Direct(torch.unsqueeze, 2),
    _aten.select.int: Direct(torch.select, 3),
    _aten.reshape.default: Direct(torch.reshape, 2),
    _aten.view.default: Direct("view", 2),
    _aten.expand.default: Direct("expand", 2),
    _aten.contiguous.default: Direct("contiguous", 1),
    _aten.to.dtype: Direct("to", 2),
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


def _means_the_same(node: Node, found: Direct) -> bool:
    """Whether its arguments are such that torch reads them as the operator's schema does."""
    if len(node.args) > found.most or "self" in node.kwargs:
        return False
    first = node.args[0] if node.args else None
    return isinstance(first, list | tuple) or (isinstance(first, Node) and _is_tensor(first))


def _is_tensor(node: Node) -> bool:
    is_placeholder = node.op == "placeholder" and node.target != BATCH_SIZE
    return is_placeholder or isinstance(node.meta.get("val"), Tensor)
