"""Backward in two halves: linears of a section graph that leave their weight gradients for later.

B of a linear computes two products: the input gradient, which an earlier stage waits for, and the weight gradient,
which only the optimizer needs. A retargeted graph does the first in autograd's pass and queues the second::

    forward     x [..., in], weight [out, in], bias [out]   ->   y [..., out]
    I           gradient of y, weight   ->   gradient of x      in autograd's pass; queues (weight, x, gradient of y)
    W           gradient of y, x        ->   weight.grad        flush(): later, in the order of the queue

The products are those that autograd itself would compute, with the same
operands, so both ways give the same bits; ``engine.graphs.split_backward_check`` checks this on the job's own data all
the same.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.cut.split import SectionGraph
from varuna.partition.opaque.calls import holds_opaque

_aten: Any = torch.ops.aten
_PENDING = "varuna_pending"


@dataclass
class PendingWeights:
    """Weight gradients that one backward of a section has left, in the order of its pass."""

    parts: list[tuple[Tensor, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = field(default_factory=list)
    """(leaf, how, input of the linear [..., in], gradient of its output [..., out])"""

    def flush(self) -> None:
        """Compute what was left and add it to the leaves' accumulators.

        The uses of one parameter are summed first, as autograd does: otherwise a parameter that is used several
        times within a section would round differently.
        """
        left = Counter(id(part[0]) for part in self.parts)
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while self.parts:
                # oldest first, the order of autograd's pass; popped, so that its operands are freed one by one
                leaf, how, taken, gradient = self.parts.pop(0)
                value = how(taken, gradient)
                if id(leaf) in sums:
                    value = sums.pop(id(leaf)) + value
                left[id(leaf)] -= 1
                if left[id(leaf)]:
                    sums[id(leaf)] = value
                elif leaf.grad is None:
                    leaf.grad = value
                else:
                    leaf.grad.add_(value)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def gradient_of_weight(taken: Tensor, gradient: Tensor) -> Tensor:
    """Weight gradient of ``linear``, [out, in]."""
    return _rows(gradient).t().mm(_rows(taken))


def gradient_of_matrix(taken: Tensor, gradient: Tensor) -> Tensor:
    """Weight gradient of ``addmm``, ``mm`` and ``matmul``, [in, out]."""
    return _rows(taken).t().mm(_rows(gradient))


def gradient_of_bias(_taken: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of a bias, [out]."""
    return _rows(gradient).sum(0)


class _Linear(torch.autograd.Function):
    """``linear(x, weight, bias)`` whose backward returns the gradient of ``x`` only."""

    @staticmethod
    def forward(ctx: Any, pending: PendingWeights, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pending, ctx.weight, ctx.bias = pending, weight, bias
        result: Tensor = _aten.linear.default(x, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient] = gradients
        x, weight = ctx.saved_tensors
        _leave(ctx, x, gradient, gradient_of_weight)
        wanted = ctx.needs_input_grad[1]
        return None, _rows(gradient).mm(weight).view(x.shape) if wanted else None, None, None


class _Product(torch.autograd.Function):
    """``x @ matrix + bias`` whose backward returns the gradient of ``x`` only."""

    @staticmethod
    def forward(ctx: Any, pending: PendingWeights, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.pending, ctx.weight, ctx.bias = pending, matrix, bias
        result: Tensor = _aten.matmul.default(x, matrix) if bias is None else _aten.addmm.default(bias, x, matrix)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient] = gradients
        x, matrix = ctx.saved_tensors
        _leave(ctx, x, gradient, gradient_of_matrix)
        wanted = ctx.needs_input_grad[1]
        return None, _rows(gradient).mm(matrix.t()).view(x.shape) if wanted else None, None, None


def _leave(ctx: Any, x: Tensor, gradient: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = x.detach()  # else its graph would stay, and with that what the section took
    ctx.pending.parts.append((ctx.weight, how, x, gradient))
    if ctx.bias is not None:
        ctx.pending.parts.append((ctx.bias, gradient_of_bias, x, gradient))


def _linear(pending: PendingWeights, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _Linear.apply(pending, x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def _product(pending: PendingWeights, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _Product.apply(pending, x, matrix, bias)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Use:
    """A node that could be retargeted: what is multiplied, by which parameter, and which is added."""

    node: Node
    function: Callable[..., Tensor]
    x: Node
    weight: Node
    bias: Node | None

    @property
    def leaves(self) -> list[Node]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def retarget(
    section: SectionGraph, trainable: Collection[str], shapes: Mapping[str, Sequence[int]]
) -> GraphModule | None:
    """Return the section's graph with its linears deferred, and ``PendingWeights`` as a further first argument.

    A parameter is deferred only if all its uses in the section can be: so each accumulator gets the sum of all
    uses at once. None if nothing can be, or if a module runs eagerly in the section: that one runs whole.
    """
    if holds_opaque(section.module.graph):
        return None
    placeholders = [node for node in section.module.graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders[_before_parameters(section) :], section.parameters, strict=False))
    candidates = [use for node in section.module.graph.nodes if (use := _use_of(node, names, shapes)) is not None]
    while True:
        # one use that cannot be deferred spoils its parameters, which spoil their other uses: until none is left
        users = {use.node: use for use in candidates}
        spoilt = {
            name
            for leaf, name in names.items()
            if name not in trainable or any(user not in users or leaf is users[user].x for user in leaf.users)
        }
        kept = [use for use in candidates if not any(names[leaf] in spoilt for leaf in use.leaves)]
        if len(kept) == len(candidates):
            break
        candidates = kept
    return _rewritten(section, users) if users else None


def _before_parameters(section: SectionGraph) -> int:
    # the order of a section's arguments: see cut.split
    return len(section.takes) + len(section.inputs) + section.needs_batch_size


def _use_of(node: Node, names: Mapping[Node, str], shapes: Mapping[str, Sequence[int]]) -> _Use | None:
    """Read a node as a product with a parameter; None if it is not one."""
    if node.op != "call_function" or node.kwargs:
        return None
    x: Any
    weight: Any
    bias: Any = None
    if node.target is _aten.linear.default:
        x, weight, bias = [*node.args, None][:3]
    elif node.target is _aten.addmm.default:
        bias, x, weight = node.args
    elif node.target in (_aten.mm.default, _aten.matmul.default):
        x, weight = node.args
    else:
        return None
    leaves = [leaf for leaf in (weight, bias) if leaf is not None]
    if not isinstance(x, Node) or not all(leaf in names for leaf in leaves):
        return None
    # matrices, with a bias of one dimension: _rows flattens what is multiplied to match
    if [len(shapes[names[leaf]]) for leaf in leaves] not in ([2], [2, 1]):
        return None
    return _Use(node, _linear if node.target is _aten.linear.default else _product, x, weight, bias)


def _rewritten(section: SectionGraph, uses: Mapping[Node, _Use]) -> GraphModule:
    graph, copies = Graph(), dict[Node, Node]()
    pending = graph.placeholder(_PENDING)
    for node in section.module.graph.nodes:
        use = uses.get(node)
        if use is None:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
        else:
            leaves = tuple(copies[leaf] for leaf in use.leaves)
            copies[node] = graph.call_function(use.function, (pending, copies[use.x], *leaves))
    return GraphModule(section.module, graph, class_name=f"Section{section.index}Deferred")
