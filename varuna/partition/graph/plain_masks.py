"""Attention whose mask says what attention can be told without one: GPUs have faster kernels for it.

Models that leave a mask out, or ask for causal attention, build it all the same while they are captured: what they
would look at is not there. A dense mask costs the fast kernels, B x L x L elements, and half of the work::

    1 0 0
    1 1 0   is_causal=True          1 1 1   no mask
    1 1 1                           1 1 1

Only a mask that follows from the number of samples alone is looked at: what hangs on samples, parameters or buffers
(padding, packed rows, prefixes), sliding windows and biases by distance stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.flow import is_random
from varuna.partition.graph.shared_memory import SharedMemory

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_SAMPLES = (2, 3)
"""Numbers of samples for which a mask is computed: with one alone, a mask that changes with it would pass."""
_MOST_ELEMENTS = 1 << 28
"""Of a mask for one sample: 16,384 x 16,384."""


def without_plain_masks(capture: Capture) -> int:
    """Rewrite attention in ``capture.graph`` in place; return how often. What is no longer used stays."""
    masks, found = _Masks(capture), 0
    for node in capture.graph.find_nodes(op="call_function", target=_ATTENTION):
        # (query, key, value, attn_mask, dropout_p, ...)
        query, key, value, *rest = node.args
        mask = rest.pop(0) if rest else node.kwargs.get("attn_mask")
        is_causal = masks.is_causal(mask) if isinstance(mask, Node) and _is_square(query, key, mask) else None
        if is_causal is None:
            continue
        told = {name: each for name, each in node.kwargs.items() if name != "attn_mask"}
        if rest:
            told["dropout_p"] = rest[0]
        if is_causal:
            told["is_causal"] = True
        node.args, node.kwargs = (query, key, value), told
        found += 1
    return found


def _is_square(query: Any, key: Any, mask: Node) -> bool:
    """Return whether keys, queries and both dimensions of the mask have one size."""
    # torch's own triangle begins at the top left: with more keys than queries it would not be this mask
    sizes = [each.meta["val"].shape[-2] for each in (query, key)] + list(mask.meta["val"].shape[-2:])
    return all(isinstance(size, int) for size in sizes) and len(set(sizes)) == 1


class _Masks:
    """Masks of one graph, each computed once: layers share them."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._memory = capture, SharedMemory(capture.graph)
        self._order = {node: place for place, node in enumerate(capture.graph.nodes)}
        self._known: dict[Node, bool | None] = {}

    def is_causal(self, mask: Node) -> bool | None:
        """Return whether a mask is the triangle; False: it hides nothing; None: neither, or it follows from samples."""
        if mask not in self._known:
            self._known[mask] = self._judge(mask)
        return self._known[mask]

    def _judge(self, mask: Node) -> bool | None:
        length = mask.meta["val"].shape[-1]
        needed = self._needed(mask) if length**2 <= _MOST_ELEMENTS else None
        if needed is None:
            return None
        found = {_is_triangle(self._value(mask, needed, samples)) for samples in _SAMPLES}
        return found.pop() if len(found) == 1 else None

    def _needed(self, mask: Node) -> list[Node] | None:
        """List the nodes behind a mask, in order; None if they are more than constants and the number of samples."""
        needed, stack = set[Node](), [mask]
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            if not self._is_number(node):
                if not self._is_known(node) or self._memory.is_written(node):
                    return None
                stack.extend(node.all_input_nodes)
            needed.add(node)
        return sorted(needed, key=self._order.__getitem__)

    def _is_number(self, node: Node) -> bool:
        """Return whether a node is a number that follows from the number of samples."""
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and value.node.expr.free_symbols <= {self._capture.batch_symbol}

    def _is_known(self, node: Node) -> bool:
        if node.op == "placeholder":
            return node.name in self._capture.constants
        pure = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
        return node.op == "call_function" and (pure or _is_arithmetic(node.target)) and not is_random(node)

    def _value(self, mask: Node, needed: list[Node], samples: int) -> Tensor:
        known: dict[Node, Any] = {}
        for node in needed:
            if self._is_number(node):
                expression = node.meta["val"].node.expr
                known[node] = int(expression.subs(self._capture.batch_symbol, samples))
            elif node.op == "placeholder":
                known[node] = self._capture.constants[node.name]
            else:
                arguments, named = map_arg((node.args, node.kwargs), known.__getitem__)
                if "device" in named:
                    named = {**named, "device": torch.device("cpu")}
                run: Callable[..., Any] = node.target  # type: ignore[assignment]
                known[node] = run(*arguments, **named)
        found: Tensor = known[mask]
        return found


def _is_arithmetic(target: object) -> bool:
    return getattr(target, "__module__", "") == "_operator" or target in (torch.sym_ite, torch.sym_not)


def _is_triangle(mask: Tensor) -> bool | None:
    """Return whether a mask is the triangle, as truths or as zeros and infinities to add; False if it hides nothing."""
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        return None
    seen = mask if mask.dtype is torch.bool else mask == 0
    hidden = ~seen if mask.dtype is torch.bool else mask == float("-inf")
    if not bool((seen | hidden).all()):
        return None
    if bool(seen.all()):
        return False
    length = mask.shape[-1]
    triangle = torch.ones(length, length, dtype=torch.bool).tril_()
    return True if bool((seen == triangle).all()) else None
