"""Sub-graphs of regions without gradients or without autocast, put back in line.

Inside a sub-graph, writes, random draws, costs and what mixes examples are hidden.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.graph.shared_memory import SharedMemory

_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(graph: Graph, owner: GraphModule, buffers: Collection[str]) -> None:
    """Replace every region of ``graph`` whose ops mean the same in line by them.

    That is a no-grad region, since what it returns is detached, and one in which autocast is off, since it is off
    around it: ``graph`` is itself no part of an autocast region.

    Args:
        graph: as exported, or the body of such a region.
        owner: holds the graphs of regions.
        buffers: placeholders that are buffers: a region may write to them.
    """
    for node in list(graph.nodes):
        if (place := _place_of_body(node)) is None:
            continue
        source, outer = node.args[place], node.args[place + 1 :]
        assert isinstance(source, Node), "the body of a region is an attribute"
        body = getattr(owner, str(source.target))
        assert isinstance(body, GraphModule), "the body of a region is a graph"
        inner = [each for each in body.graph.nodes if each.op == "placeholder"]
        given = dict(zip(inner, outer, strict=True))
        own = {each.name for each, value in given.items() if isinstance(value, Node) and value.name in buffers}
        # from the inside: a region that holds another one cannot be put in line
        inline_regions(body.graph, body, own)
        if _can_inline(body.graph, node, own):
            _inline(graph, body.graph, node, given, detaches=node.target is _NO_GRAD)
            if not source.users:
                graph.erase_node(source)
        else:
            body.recompile()  # regions within it may have gone


def _place_of_body(node: Node) -> int | None:
    """Among the arguments of a region that means the same in line; None: it is no such region."""
    # (enabled, body, ...) and (device type, dtype, enabled, cache enabled, body, ...)
    if node.target is _NO_GRAD and node.args[0] is False:
        return 1
    return 4 if node.target is _AUTOCAST and node.args[2] is False else None


def _can_inline(body: Graph, region: Node, buffers: Collection[str]) -> bool:
    """Return whether results are read by position, no graph is within, and writes go to buffers or own tensors only."""
    if any(inner.op in ("get_attr", "call_module") for inner in body.nodes):
        return False
    memory = SharedMemory(body)
    inner = [each for each in body.nodes if each.op == "placeholder"]
    foreign = any(memory.is_written(each) and each.name not in buffers for each in inner)
    return not foreign and all(user.target is operator.getitem for user in region.users)


def _inline(graph: Graph, body: Graph, region: Node, given: Mapping[Node, Any], *, detaches: bool) -> None:
    copies = dict(given)
    returned: tuple[object, ...] = ()
    with graph.inserting_before(region):
        for node in body.nodes:
            if node.op == "output":
                returned = tuple(node.args[0]) if isinstance(node.args[0], list | tuple) else (node.args[0],)
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda source: copies[source])
        made = {each: copies[each] for each in returned if isinstance(each, Node)}
        if detaches:
            made = {each: _detached(graph, value) for each, value in made.items()}
    for user in list(region.users):
        result = returned[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(made[result])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(region)


def _detached(graph: Graph, node: Node) -> Node:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    result = graph.call_function(torch.ops.aten.detach.default, (node,))
    result.meta = dict(node.meta)
    return result
