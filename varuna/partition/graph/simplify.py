"""Remove what capture leaves over: asserts, no-op casts, empty cache tensors.

Each of these would count as work, keep a second name of a tensor alive across a cut, or drag constants
into sections. Values do not change.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.operations import op_name
from varuna.partition.graph.shared_memory import SharedMemory, written_arguments

aten = torch.ops.aten
_ASSERTS = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_scalar",
    "aten::_assert_async",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}


def simplify(capture: Capture) -> None:
    """Rewrite ``capture.graph`` in place; afterwards every node is needed by the outputs or a truth."""
    graph = capture.graph
    _complete_users(graph)
    constants = {*capture.constants, *capture.buffers, *capture.inputs}
    memory = SharedMemory(graph)
    for node in list(graph.nodes):
        if op_name(node) in _ASSERTS:
            graph.erase_node(node)
            continue
        same = _same_value(node)
        if same is None:
            continue
        # two memories, one of them written: as one value, the other would change too
        if not _is_argument(node, same, memory) and (memory.is_written(node) or memory.is_written(same)):
            continue
        # on an activation it ends a gradient, which is more than a name
        if op_name(node) == "aten::detach_" and same.name not in constants:
            continue
        node.replace_all_uses_with(same)
        if op_name(node) == "aten::detach_":
            graph.erase_node(node)
    _drop_dead(graph, {truth.node for truth in capture.truths})
    graph.lint()


def _complete_users(graph: Graph) -> None:
    """Put back users of nodes in front of ``no_grad`` regions: torch 2.13 forgets some, and cannot erase them then."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def _is_argument(node: Node, same: Node, memory: SharedMemory) -> bool:
    """Return whether the two are one tensor, or lie in the same memory, so that a write to one is a write to both."""
    return op_name(node) not in _COPIES and (op_name(node) == "aten::dropout" or memory.share_memory(node, same))


def _same_value(node: Node) -> Node | None:
    """The argument that ``node`` merely renames, if it does."""
    rule = _broadcast if node.target is operator.getitem else _RULES.get(op_name(node))
    source = rule(node) if rule is not None else None
    return source if isinstance(source, Node) else None


def _cast(node: Node) -> Node | None:
    source, after = node.args[0], node.meta.get("val")
    before = source.meta.get("val") if isinstance(source, Node) else None
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return None
    # after the dtype, non_blocking and copy may be given by place: in doubt it copies
    copies = node.kwargs.get("copy", False) or True in node.args[2:]
    same = before.dtype == after.dtype and before.device == after.device and before.layout == after.layout
    return source if same and not copies and isinstance(source, Node) else None


def _dropout(node: Node) -> object:
    return node.args[0] if node.args[1] == 0 or node.args[2] is False else None


def _detach_of_constant(node: Node) -> object:
    """Return a constant itself, which ``lift_fresh_copy`` of it has become: it needs no detaching."""
    source = node.args[0]
    return source if isinstance(source, Node) and source.op == "placeholder" else None


def _fresh_copy(node: Node) -> object:
    """Return the constant for its copy, to which nothing writes (``detach_`` only touches autograd)."""
    return node.args[0]


def _full_slice(node: Node) -> object:
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    # (self, dim, start, end, step)
    step = node.args[4] if len(node.args) > 4 else 1
    start = node.args[2] if len(node.args) > 2 else 0
    same = isinstance(before, Tensor) and isinstance(after, Tensor) and _sizes(before) == _sizes(after)
    return source if same and step == 1 and start in (0, None) else None


def _sizes(value: Tensor) -> list[str]:
    """Sizes as text, since sizes that depend on data cannot be compared."""
    return [str(size) for size in value.shape]


def _broadcast(node: Node) -> object:
    """The argument itself where it is broadcast with others to a shape that it has already, as in losses."""
    several, place = node.args
    if not isinstance(several, Node) or op_name(several) != "aten::broadcast_tensors":
        return None
    source = several.args[0][place]  # type: ignore[index]
    before = source.meta.get("val") if isinstance(source, Node) else None
    after = node.meta.get("val")
    same = isinstance(before, Tensor) and isinstance(after, Tensor) and _sizes(before) == _sizes(after)
    return source if same else None


def _cat_with_empty(node: Node) -> object:
    """``x`` of ``cat([empty, x])``, which an unused key/value cache leaves in every layer."""
    parts = node.args[0]
    if not isinstance(parts, list | tuple):
        return None
    full = [part for part in parts if isinstance(part, Node) and not _is_empty(part)]
    return full[0] if len(full) == 1 and len(parts) > 1 else None


def _is_empty(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape[0] == 0


_RULES: dict[str, Callable[[Node], object]] = {
    "aten::to": _cast,
    "aten::alias": lambda node: node.args[0],
    "aten::dropout": _dropout,
    "aten::detach_": _detach_of_constant,
    "aten::lift_fresh_copy": _fresh_copy,
    "aten::slice": _full_slice,
    "aten::cat": _cat_with_empty,
}


_COPIES = ("aten::lift_fresh_copy", "aten::cat")
"""Have memory of their own."""


def _drop_dead(graph: Graph, kept: set[Node]) -> None:
    # from the end: what only dead nodes use is dead by the time it is met; a write in place has no users, but readers
    for node in reversed(list(graph.nodes)):
        is_dead = node not in kept and not node.users and not written_arguments(node)
        if is_dead and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)
