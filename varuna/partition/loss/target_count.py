"""How much a micro-batch counts: the number of targets that the captured loss itself averages over.

Averaging the means of micro-batches is wrong under padding by up to 170 %,
and Hugging Face shifts its labels, so an unshifted count is wrong too. The graph knows better.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from varuna.partition.graph.captured import Capture
from varuna.partition.loss.batch_dimension import Count

aten = torch.ops.aten


def add_count(capture: Capture, count: Count) -> Node | None:
    """Add what all terms of the loss are divided by to the graph; None if that is the number of examples."""
    if count.kind == "examples":
        return None
    output = next(node for node in capture.graph.nodes if node.op == "output")
    with capture.graph.inserting_before(output):
        if count.kind == "picked":
            return call(capture.graph, aten.sum.default, (count.nodes[0],))
        return count_targets(capture.graph, *count.nodes)


def count_targets(graph: Graph, target: Any, ignored: Any, class_weight: Any) -> Node:
    """The number of targets that a mean cross-entropy divides by, or the sum of their classes' weights."""
    counted = call(graph, aten.ne.Scalar, (target, ignored))
    if isinstance(class_weight, Node):  # the mean then divides by the sum of the targets' class weights
        safe = call(graph, aten.clamp_min.default, (target, 0))
        each = call(graph, aten.index.Tensor, (class_weight, [safe]))
        counted = call(graph, aten.mul.Tensor, (each, counted))
    return call(graph, aten.sum.default, (counted,))


def call(graph: Graph, op: Any, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None) -> Node:
    """A new node where the graph inserts, with its captured value."""
    node = graph.call_function(op, args, dict(kwargs or {}))  # type: ignore[arg-type]

    def value(argument: object) -> object:
        if isinstance(argument, list | tuple):
            return [value(each) for each in argument]
        return argument.meta["val"] if isinstance(argument, Node) else argument

    node.meta["val"] = op(*map(value, args), **{name: value(each) for name, each in node.kwargs.items()})
    return node
