"""The weight of a micro-batch: the number of targets that the captured loss itself averages over.

Averaging the means of micro-batches is wrong under padding by up to 170 %,
and Hugging Face shifts its labels, so an unshifted count is wrong too. The graph knows better.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.size_nodes import SizeNodes
from varuna.partition.loss.batch_dimension import Count
from varuna.partition.loss.open_terms import sizes_along

aten = torch.ops.aten


def add_count(capture: Capture, count: Count) -> Node | None:
    """Add what all terms of the loss are divided by to the graph; None if that is the number of examples."""
    if count.kind == "examples":
        return None
    output = next(node for node in capture.graph.nodes if node.op == "output")
    with capture.graph.inserting_before(output):
        if count.kind == "picked":
            return call(capture.graph, aten.sum.default, (count.nodes[0],))
        if count.kind == "elements":
            value, dims = count.nodes
            assert isinstance(value, Node)
            return count_elements(capture, value, dims)
        return count_targets(capture.graph, *count.nodes)


def count_elements(capture: Capture, value: Node, dims: Any = None) -> Node:
    """The number of elements along dimensions of a value whose sizes are open.

    Raises:
        CannotCountError: a size does not follow from the inputs' sizes.
    """
    sizes = SizeNodes(capture.graph, capture.open_symbols)
    number: Any = 1
    for size in sizes_along(value.meta["val"], dims):
        each = sizes.of(size)
        if each is None:
            raise CannotCountError(value)
        number = each if number == 1 else sizes.times(number, each)
    return call(capture.graph, aten.scalar_tensor.default, (number,), {"dtype": torch.int64})


class CannotCountError(Exception):
    """A number of the whole batch does not follow from counts; ``node`` makes it."""

    def __init__(self, node: Node) -> None:
        super().__init__(str(node))
        self.node = node


def count_targets(graph: Graph, target: Any, ignored: Any, class_weight: Any) -> Node:
    """The number of targets that a mean cross-entropy divides by, or the sum of their classes' weights."""
    counted = call(graph, aten.ne.Scalar, (target, ignored))
    if isinstance(class_weight, Node):  # the mean then divides by the sum of the targets' class weights
        # ignored targets (-100) are no row of the weights; they count 0 all the same, by ``counted``
        safe = call(graph, aten.clamp_min.default, (target, 0))
        each = call(graph, aten.index.Tensor, (class_weight, [safe]))
        counted = call(graph, aten.mul.Tensor, (each, counted))
    return call(graph, aten.sum.default, (counted,))


def call(graph: Graph, op: Any, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None) -> Node:
    """Make a node where the graph inserts, with its captured value."""
    node = graph.call_function(op, args, dict(kwargs or {}))  # type: ignore[arg-type]

    def value(argument: object) -> object:
        if isinstance(argument, list | tuple):
            return [value(each) for each in argument]
        return argument.meta["val"] if isinstance(argument, Node) else argument

    with fake_mode_of(graph):
        node.meta["val"] = op(*map(value, args), **{name: value(each) for name, each in node.kwargs.items()})
    return node


def fake_mode_of(graph: Graph) -> Any:
    """The mode of the graph's captured values."""
    fakes = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode for value in fakes if isinstance(value, torch._subclasses.FakeTensor))
