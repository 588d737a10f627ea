"""F computes the bits that R computes, where an operation asks whether a gradient will be wanted before it computes.

Attention with a learned mask has another kernel without a graph (on a GPU any attention may have: wide heads, cuDNN's
plans), an LSTM too, and a product of a matrix and a batch is folded in another way. Which runs of a section have a
graph depends on the plan (a last stage has no F of its own), so such operations run with a graph in F as well, each for
itself: what it keeps for a backward goes at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_ATTENTION, _PRODUCT = "aten::scaled_dot_product_attention", "aten::matmul"
_ASKING = (_ATTENTION, _PRODUCT, "aten::lstm")


def without_graph(module: GraphModule, arguments: Sequence[object]) -> GraphModule:
    """Make what computes without a graph what ``module`` computes with one; ``module`` itself if both agree.

    Args:
        module: a section's graph.
        arguments: what it is called with; a gradient will be wanted of those tensors that require one.
    """
    given = dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), arguments, strict=True))
    learns = _learning(module, given)
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in arguments)
    asking = [node for node in module.graph.nodes if _asks(node, learns, given, on_gpu=on_gpu)]
    if not asking:
        return module
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
        if node in asking:
            leaves = tree_leaves((node.args, node.kwargs), is_leaf=lambda value: isinstance(value, Node))
            flags = tuple(isinstance(leaf, Node) and leaf in learns for leaf in leaves)
            copy = copies[node]
            copy.target = as_with_graph
            copy.args = (str(node.target), flags, *copy.args)
    return GraphModule(module, graph, class_name=f"{type(module).__name__}WithoutGraph")


def as_with_graph(name: str, wanted: Sequence[bool], *args: Any, **kwargs: Any) -> Any:
    """Run an operation as where a gradient is wanted of some of its arguments.

    Args:
        name: of the operation, such as ``aten.matmul.default``.
        wanted: for each leaf of its arguments, whether a gradient of it will be wanted.
        args: its arguments.
        kwargs: its named arguments.
    """
    namespace, packet, overload = name.split(".")
    operation = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [leaf.detach().requires_grad_() if flag else leaf for leaf, flag in zip(leaves, wanted, strict=True)]
    given, named = tree_unflatten(leaves, spec)
    with torch.enable_grad():
        made = operation(*given, **named)
    return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, made)


def _learning(module: GraphModule, given: Mapping[Node, object]) -> set[Node]:
    """Find the values of which a gradient will be wanted."""
    learns = {node for node, value in given.items() if isinstance(value, Tensor) and value.requires_grad}
    for node in module.graph.nodes:
        is_cut_off = node.target is torch.ops.aten.detach.default or not _carries(node.meta.get("val"))
        if not is_cut_off and any(source in learns for source in node.all_input_nodes):
            learns.add(node)
    return learns


def _carries(value: object) -> bool:
    """Return whether a gradient can belong to a value."""
    if isinstance(value, list | tuple):
        return any(_carries(each) for each in value)
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _asks(node: Node, learns: set[Node], given: Mapping[Node, object], *, on_gpu: bool) -> bool:
    """Return whether the kernel of an operation may depend on whether a gradient is wanted."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    if name not in _ASKING or not any(source in learns for source in node.all_input_nodes):
        return False
    if name == _ATTENTION:
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        return on_gpu or (isinstance(mask, Node) and mask in learns)
    if name == _PRODUCT:
        values = [given.get(each, each.meta.get("val")) for each in node.args[:2] if isinstance(each, Node)]
        dims = [value.dim() for value in values if isinstance(value, Tensor)]
        return len(dims) < 2 or min(dims) <= 2 < max(dims)
    return True
