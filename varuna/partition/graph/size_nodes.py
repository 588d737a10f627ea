"""Open sizes of a captured graph, read from the batch: every section that needs one computes it from its inputs."""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
_SIZES = (aten.sym_size.int,)


class SizeNodes:
    """Makes nodes for expressions of open sizes, and reads them from inputs wherever the graph read them."""

    def __init__(self, graph: Graph, symbols: Mapping[Any, tuple[str, int]]) -> None:
        """Prepare.

        Args:
            graph: captured.
            symbols: symbol of a size -> placeholder of an input, and its dimension.
        """
        self._graph = graph
        nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
        self._places = {symbol: (nodes[name], dim) for symbol, (name, dim) in symbols.items()}
        self._made: dict[Any, Any] = {}

    def read_from_inputs(self) -> None:
        """Let every size of a computed value be computed from sizes of inputs instead."""
        for node in list(self._graph.nodes):
            value = node.meta.get("val")
            if node.target not in _SIZES or not isinstance(value, torch.SymInt):
                continue
            made = self.of(value)
            if made is not None and made is not node:
                node.replace_all_uses_with(made)
                self._graph.erase_node(node)

    def of(self, size: object) -> Any:
        """A node (or a number) that has the value of a size; None if that does not follow from open sizes alone."""
        if not isinstance(size, torch.SymInt):
            return size
        return self._of(size.node.expr)

    def _of(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._made:
            self._made[expression] = self._node(expression)
        return self._made[expression]

    def _node(self, expression: Any) -> Any:
        if expression in self._places:
            source, dim = self._places[expression]
            return self._call(aten.sym_size.int, source, dim, value=source.meta["val"].shape[dim])
        if not (expression.is_Add or expression.is_Mul):
            return None
        parts = [self._of(part) for part in expression.args]
        if any(part is None for part in parts):
            return None
        combined = self._added if expression.is_Add else self.times
        return functools.reduce(combined, parts)

    def times(self, one: Any, other: Any) -> Any:
        """The product of two sizes, each a node or a number."""
        return self._combined(operator.mul, one, other)

    def _added(self, one: Any, other: Any) -> Any:
        return self._combined(operator.add, one, other)

    def _combined(self, function: Any, one: Any, other: Any) -> Any:
        values = [each.meta["val"] if isinstance(each, Node) else each for each in (one, other)]
        if not any(isinstance(each, Node) for each in (one, other)):
            return function(*values)
        return self._call(function, one, other, value=function(*values))

    def _call(self, target: Any, *args: Any, value: Any) -> Node:
        # in front of all other ops, which may use it, and behind sizes made before, which it may use
        first = next(node for node in self._graph.nodes if node.op != "placeholder" and node not in self._made.values())
        with self._graph.inserting_before(first):
            node = self._graph.call_function(target, args)
        node.meta["val"] = value
        return node
