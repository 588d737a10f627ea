"""Sub-graphs of no-grad regions, put back in line: inside a sub-graph, writes, random draws and costs are hidden."""

import operator
from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.graph.shared_memory import SharedMemory

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_no_grad(graph: Graph, owner: GraphModule, buffers: Collection[str]) -> None:
    """Replace every no-grad region of ``graph`` by its ops; what it returns is detached.

    Args:
        graph: as exported.
        owner: holds the graphs of regions.
        buffers: placeholders that are buffers: a region may write to them.
    """
    for node in list(graph.nodes):
        if node.target is _REGION and node.args[0] is False:
            body = _body(owner, node)
            if _can_inline(body, node, buffers):
                _inline(graph, body, node)


def _body(owner: GraphModule, node: Node) -> Graph:
    source = node.args[1]
    assert isinstance(source, Node), "the body of a region is an attribute"
    body = getattr(owner, str(source.target))
    assert isinstance(body, GraphModule), "the body of a region is a graph"
    return body.graph


def _can_inline(graph: Graph, node: Node, buffers: Collection[str]) -> bool:
    """Whether a region can: results are read by position, no graph within, writes to buffers or own tensors only."""
    if any(inner.op in ("get_attr", "call_module") for inner in graph.nodes):
        return False
    memory = SharedMemory(graph)
    inner = [each for each in graph.nodes if each.op == "placeholder"]
    outer = node.args[2:]
    foreign = any(
        memory.is_written(each) and not (isinstance(given, Node) and given.name in buffers)
        for each, given in zip(inner, outer, strict=True)
    )
    return not foreign and all(user.target is operator.getitem for user in node.users)


def _inline(graph: Graph, body: Graph, region: Node) -> None:
    inner = [each for each in body.nodes if each.op == "placeholder"]
    copies: dict[Node, Node] = dict(zip(inner, region.args[2:], strict=True))  # type: ignore[arg-type]
    returned: tuple[object, ...] = ()
    with graph.inserting_before(region):
        for node in body.nodes:
            if node.op == "output":
                returned = tuple(node.args[0]) if isinstance(node.args[0], list | tuple) else (node.args[0],)
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda source: copies[source])
        detached = {each: _detached(graph, copies[each]) for each in returned if isinstance(each, Node)}
    for user in list(region.users):
        result = returned[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(detached[result])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(region)


def _detached(graph: Graph, node: Node) -> Node:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    result = graph.call_function(torch.ops.aten.detach.default, (node,))
    result.meta = dict(node.meta)
    return result
