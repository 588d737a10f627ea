"""Whether two graphs are equal, with or without the names of their nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node


def code_of(module: GraphModule) -> str:
    """A graph as code, with that of regions within it, such as those under autocast."""
    inner = [code_of(each) for _, each in sorted(module.named_children()) if isinstance(each, GraphModule)]
    return "\n".join([module.code, *inner])


def shape_of(module: GraphModule) -> list[Any]:
    """The graph without the names of its nodes: (op, target, arguments as positions of earlier nodes)."""
    position: dict[Node, int] = {}
    rows: list[Any] = []
    for node in module.graph.nodes:
        target: Any = str(node.target) if node.op.startswith("call") else None
        if node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            target = shape_of(inner) if isinstance(inner, GraphModule) else tuple(getattr(inner, "shape", ()))
        rows.append((node.op, target, _plain(node.args, position), _plain(node.kwargs, position)))
        position[node] = len(position)
    return rows


def _plain(value: Any, position: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        return ("node", position[value])
    if isinstance(value, Mapping):
        return sorted((key, repr(_plain(each, position))) for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each, position) for each in value]
    return repr(value)
