"""How much a micro-batch counts: the number of targets that the captured loss itself averages over.

Averaging the means of micro-batches is wrong under padding by up to 170 % (``reference/pytorch.md`` §4f),
and Hugging Face shifts its labels, so an unshifted count is wrong too. The graph knows better.
"""

import torch
from torch.fx import Node

from varuna.partition.captured import Capture
from varuna.partition.simplify import op_name

aten = torch.ops.aten
_MEAN = 1
_LOSSES = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d")


def add_target_count(capture: Capture) -> Node | None:
    """Add the count of targets to the graph and return its node; None if no single averaging loss is found."""
    output = next(node for node in capture.graph.nodes if node.op == "output")
    loss = output.args[0][0]
    losses = [node for node in _ancestors(loss) if op_name(node) in _LOSSES]
    if len(losses) != 1 or _argument(losses[0], 3, "reduction", _MEAN) != _MEAN:
        return None
    target = losses[0].args[1]
    if not isinstance(target, Node) or target.meta["val"].is_floating_point():
        return None
    if any(node.name in capture.parameters for node in _ancestors(target)):
        return None  # targets that the model computes cannot be counted from the inputs
    with capture.graph.inserting_before(output):
        return _count(capture, losses[0], target)


def _count(capture: Capture, loss: Node, target: Node) -> Node:
    graph = capture.graph
    ignored = _argument(loss, 4, "ignore_index", -100)
    class_weight = _argument(loss, 2, "weight", None)
    counted = _call(graph, aten.ne.Scalar, (target, ignored))
    if isinstance(class_weight, Node):  # the mean then divides by the sum of the targets' class weights
        safe = _call(graph, aten.clamp_min.default, (target, 0))
        each = _call(graph, aten.index.Tensor, (class_weight, [safe]))
        counted = _call(graph, aten.mul.Tensor, (each, counted))
    return _call(graph, aten.sum.default, (counted,))


def _call(graph: torch.fx.Graph, op: torch._ops.OpOverload, args: tuple[object, ...]) -> Node:
    node = graph.call_function(op, args)  # type: ignore[arg-type]

    def value(argument: object) -> object:
        return argument.meta["val"] if isinstance(argument, Node) else argument

    node.meta["val"] = op(*[[value(a) for a in arg] if isinstance(arg, list) else value(arg) for arg in args])
    return node


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _ancestors(node: Node) -> list[Node]:
    seen: dict[Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen[current] = None
            stack.extend(current.all_input_nodes)
    return list(seen)
