"""A section's graph for arguments of one kind, named so that equal sections have equal code."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

_ARITHMETIC = (operator.add, operator.mul)


@dataclass(frozen=True)
class Specialised:
    """Takes tensors only, each once: what was a number of examples is a constant."""

    module: GraphModule
    positions: tuple[int, ...]
    """of its arguments among those of the section"""
    is_whole: bool
    """its code says everything; False: it refers to sub-graphs"""

    def pick(self, arguments: Sequence[Any]) -> list[Tensor]:
        """Its arguments, from the section's."""
        return [arguments[position] for position in self.positions]


def specialise(section: GraphModule, arguments: Sequence[Any]) -> Specialised:
    """Specialise ``section`` for ``arguments``: their integers, and which of its tensors are the same one."""
    graph = Graph()
    known: dict[Node, Argument] = {}
    seen: dict[int, Node] = {}
    positions: list[int] = []
    given = iter(enumerate(arguments))
    is_whole = True
    for number, node in enumerate(section.graph.nodes):
        if node.op == "placeholder":
            position, value = next(given)
            if not isinstance(value, Tensor):
                known[node] = value
                continue
            if id(value) not in seen:
                seen[id(value)] = graph.placeholder(f"a{len(positions)}")
                positions.append(position)
            known[node] = seen[id(value)]
            continue
        args = map_arg(node.args, lambda source: known[source])
        if node.target in _ARITHMETIC and all(isinstance(value, int) for value in args):
            known[node] = node.target(*args)
        else:
            is_whole &= node.op != "get_attr"
            kwargs = map_arg(node.kwargs, lambda source: known[source])
            known[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"v{number}")
    return Specialised(GraphModule(section, graph, class_name="Compiled"), tuple(positions), is_whole)
