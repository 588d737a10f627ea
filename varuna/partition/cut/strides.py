"""Strides of tensors in memory, which a cut changes: whatever crosses one arrives contiguous.

Almost no op minds. ``view`` refuses what it could do before, and ``as_strided`` would read other elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.costs import is_view
from varuna.partition.graph.operations import op_name
from varuna.partition.graph.shared_memory import SharedMemory

aten = torch.ops.aten


def settle_strides(capture: Capture) -> None:
    """Let every op of ``capture.graph`` compute the same however its arguments lie in memory."""
    for module in capture.owner.modules():
        if isinstance(module, GraphModule):
            _settle(module.graph)


def _settle(graph: Graph) -> None:
    memory = SharedMemory(graph)
    laid: set[Node] = set()
    for node in list(graph.nodes):
        if op_name(node) not in ("aten::view", "aten::as_strided") or not isinstance(node.args[0], Node):
            continue
        root = _root(node.args[0])
        if memory.is_written(root) or memory.is_written(node):
            continue  # a copy would miss the write; nothing is cut between the two
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif op_name(node) == "aten::as_strided" and root not in laid:
            laid |= {root, _lay_out(graph, root)}


def _root(node: Node) -> Node:
    """The op or placeholder whose memory ``node`` is a view of."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _lay_out(graph: Graph, root: Node) -> Node:
    """Insert an op that gives ``root`` the strides that it was captured with, and does nothing where it has them."""
    value = root.meta.get("val")
    order = _outermost_first(value) if isinstance(value, Tensor) else None
    if order is None:
        return root
    after = root
    # an fx graph has all placeholders first
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        ordered = graph.call_function(aten.permute.default, (root, order))
    with graph.inserting_after(ordered):
        dense = graph.call_function(aten.contiguous.default, (ordered,))
    # the inverse permutation: the dimensions as they were, over memory in the order of strides
    with graph.inserting_after(dense):
        laid = graph.call_function(aten.permute.default, (dense, [order.index(d) for d in range(len(order))]))
    ordered.meta = dense.meta = {**root.meta, "val": aten.permute.default(value, order)}
    laid.meta = dict(root.meta)
    # all uses but that of the first permutation, which makes it
    root.replace_all_uses_with(laid, delete_user_cb=lambda user: user is not ordered)
    return laid


def _outermost_first(value: Tensor) -> list[int] | None:
    """Dimensions by stride; None if the tensor does not fill its memory."""
    sizes, strides = _hints(value.shape), _hints(value.stride())
    order = sorted(range(value.dim()), key=lambda dimension: -strides[dimension])
    expected = 1
    for dimension in reversed(order):
        if sizes[dimension] != 1 and strides[dimension] != expected:
            return None
        expected *= sizes[dimension]
    return order


def _hints(sizes: Sequence[object]) -> list[int]:
    return [int(size.node.hint) if isinstance(size, torch.SymInt) else int(size) for size in sizes]  # type: ignore[call-overload]
