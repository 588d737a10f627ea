"""Parameters that a gradient reaches: autograd gives the others none, so no optimizer touches them, decay and all."""

import torch
from torch.fx import Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.costs import tensors_of
from varuna.partition.graph.operations import closure, op_name
from varuna.partition.graph.shared_memory import SharedMemory

_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_ENDS = ("aten::detach", "aten::detach_")


def reached_parameters(capture: Capture, loss: Node) -> frozenset[str]:
    """Trained parameters from which a way leads to the loss that ``no_grad`` and ``detach`` leave open.

    In doubt there is one. All, if there is none at all: then the loss trains nothing, which is told elsewhere.
    """
    memory = SharedMemory(capture.graph)

    def behind(node: Node) -> list[Node]:
        if _ends(node):  # what was written before a value was detached is behind that
            return [each for each in memory.writers(node) if node < each]
        return [*node.all_input_nodes, *memory.writers(node)]

    seen = closure([loss], behind)
    found = capture.trainable & {capture.parameters[node.name] for node in seen if node.name in capture.parameters}
    return frozenset(found) or capture.trainable


def _ends(node: Node) -> bool:
    """Return whether no gradient goes through a node to what it was made of."""
    if node.target is _NO_GRAD:
        return node.args[0] is False
    name = op_name(node)
    # these take shape and dtype of their argument, not its values
    if name in _ENDS or name.endswith("_like") or name.startswith("aten::new_"):
        return True
    values = tensors_of(node)
    return bool(values) and not any(value.is_floating_point() or value.is_complex() for value in values)
