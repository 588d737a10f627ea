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


class DirectCall(NamedTuple):
    """The call that takes an operator's place."""

    call: Callable[..., Any] | str
    """a function, or the name of a method of the first argument"""
    most: int
    """most positional arguments that mean the same"""


DIRECT: dict[Any, DirectCall] = {
    _aten.add.Tensor: DirectCall(torch.add, 2),
    _aten.sub.Tensor: DirectCall(torch.sub, 2),
    _aten.mul.Tensor: DirectCall(torch.mul, 2),
    _aten.div.Tensor: DirectCall(torch.div, 2),
    _aten.pow.Tensor_Scalar: DirectCall(torch.pow, 2),
    _aten.neg.default: DirectCall(torch.neg, 1),
    _aten.rsqrt.default: DirectCall(torch.rsqrt, 1),
    _aten.tanh.default: DirectCall(torch.tanh, 1),
    _aten.sigmoid.default: DirectCall(torch.sigmoid, 1),
    _aten.relu.default: DirectCall(torch.relu, 1),
    _aten.gelu.default: DirectCall(_functional.gelu, 1),
    _aten.mean.dim: DirectCall(torch.mean, 3),
    _aten.matmul.default: DirectCall(torch.matmul, 2),
    _aten.bmm.default: DirectCall(torch.bmm, 2),
    _aten.addmm.default: DirectCall(torch.addmm, 3),
    _aten.embedding.default: DirectCall(torch.embedding, 5),
    _aten.linear.default: DirectCall(_functional.linear, 3),
    _aten.layer_norm.default: DirectCall(torch.layer_norm, 6),
    _aten.scaled_dot_product_attention.default: DirectCall(_functional.scaled_dot_product_attention, 6),
    _aten.dropout.default: DirectCall(torch.dropout, 3),
    _aten.cat.default: DirectCall(torch.cat, 2),
    _aten.transpose.int: DirectCall(torch.transpose, 3),
    _aten.permute.default: DirectCall(torch.permute, 2),
    _aten.unsqueeze.default: DirectCall(torch.unsqueeze, 2),
    _aten.select.int: DirectCall(torch.select, 3),
    _aten.reshape.default: DirectCall(torch.reshape, 2),
    _aten.view.default: DirectCall("view", 2),
    _aten.expand.default: DirectCall("expand", 2),
    _aten.contiguous.default: DirectCall("contiguous", 1),
    _aten.to.dtype: DirectCall("to", 2),
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


def _means_the_same(node: Node, found: DirectCall) -> bool:
    """Return whether its arguments are such that torch reads them as the operator's schema does."""
    if len(node.args) > found.most or "self" in node.kwargs:
        return False
    first = node.args[0] if node.args else None
    return isinstance(first, list | tuple) or (isinstance(first, Node) and _is_tensor(first))


def _is_tensor(node: Node) -> bool:
    is_placeholder = node.op == "placeholder" and node.target != BATCH_SIZE
    return is_placeholder or isinstance(node.meta.get("val"), Tensor)
