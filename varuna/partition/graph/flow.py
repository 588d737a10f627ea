"""Dependencies in a flat graph: ops that are rebuilt anywhere, and places where it can be cut.

A position, ``i``, is an index in ``Flow.ops``. A cut at i lies between ops i and i + 1.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.costs import Sizes, tensors_of
from varuna.partition.graph.operations import op_name
from varuna.partition.graph.shared_memory import SharedMemory, bodies_of, written_arguments
from varuna.partition.opaque.autograd_functions import NAMESPACE as FUNCTIONS
from varuna.partition.opaque.calls import NAMESPACE as MODULES


class Together(NamedTuple):
    """Ops that no cut may part: from the first of some to the last of these and others."""

    first: tuple[Node, ...]
    """operations; a placeholder stands for all that read it"""
    last: tuple[Node, ...]
    """operations"""


class ShapeLines(NamedTuple):
    """A shape, linear in the number of examples, or in open sizes."""

    fixed: tuple[int, ...]
    per_example: tuple[int, ...]
    """with open sizes: about the shape for one"""
    per_size: tuple[tuple[int, ...], ...] = ()
    """of each dimension, for each open size"""


@dataclass
class Flow:
    """The graph's ops in order and what depends on what: shared by the choice of cuts and by the split."""

    capture: Capture
    sizes: Sizes
    together: Sequence[Together] = ()
    ops: list[Node] = field(default_factory=list)
    """ops that belong to exactly one section"""
    rebuilt: set[Node] = field(default_factory=set)
    """ops that depend on inputs and constants only"""
    differentiable: set[Node] = field(default_factory=set)
    """values through which a gradient can reach a trainable parameter"""

    memory: SharedMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = SharedMemory(self.capture.graph)
        self.rebuilt = self._find_rebuilt()
        for node in self.capture.graph.nodes:
            if node.op in ("placeholder", "output"):
                if self.capture.parameters.get(node.name) in self.capture.trainable:
                    self.differentiable.add(node)
                continue
            if node in self.rebuilt:
                continue
            self.ops.append(node)
        self._find_differentiable()

    def _find_differentiable(self) -> None:
        """Follow gradients from op to op, and through memory: after ``out[:, i] = x`` they go from ``out`` to ``x``."""
        written, before = set[Hashable](), -1
        while len(written) > before:  # once, where nothing is written
            before = len(written)
            for node in self.ops:
                if any(source in self.differentiable for source in node.all_input_nodes):
                    written.update(memory for each in written_arguments(node) for memory in self.memory.of(each))
                elif written.isdisjoint(self.memory.of(node)):
                    continue
                if any(value.is_floating_point() or value.is_complex() for value in tensors_of(node)):
                    self.differentiable.add(node)

    def _find_rebuilt(self) -> set[Node]:
        """Ops that depend on inputs and constants only, in memory to which nothing else writes."""
        nodes = [node for node in self.capture.graph.nodes if node.op not in ("placeholder", "output")]
        # from all downwards: a later write into memory can spoil an op before it, so no single pass in order decides
        found, before = set(nodes), len(nodes) + 1
        while len(found) < before:
            before = len(found)
            mixed = {each for node in nodes if node not in found for each in written_arguments(node)}
            spoilt = {memory for node in mixed for memory in self.memory.of(node)}
            for node in nodes:
                if node in found and not (self._follows(node, found) and spoilt.isdisjoint(self.memory.of(node))):
                    found.remove(node)
        return found

    def _follows(self, node: Node, rebuilt: set[Node]) -> bool:
        if self.size_of(node) is not None:
            return True
        sources = node.all_input_nodes
        # rebuilt in two sections, a draw would be two draws; and a parameter is in one section's state
        if is_random(node) or any(source.name in self.capture.parameters for source in sources):
            return False
        return all(source.op in ("placeholder", "get_attr") or source in rebuilt for source in sources)

    def size_of(self, node: Node) -> tuple[int, int] | None:
        """``(fixed, per_example)`` of a size that follows from the number of examples, whatever it is read from."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or self.capture.batch_symbol is None:
            return None
        if not value.node.expr.free_symbols <= {self.capture.batch_symbol}:
            return None
        return linear(value, self.sizes)

    def last_use(self) -> dict[Node, int]:
        """Op -> position (in ``ops``) of its last user; through rebuilt values nothing stays alive."""
        position = {node: i for i, node in enumerate(self.ops)}
        end = len(self.ops)
        return {
            node: max((position.get(user, end if user.op == "output" else -1) for user in node.users), default=-1)
            for node in self.ops
        }

    def layers(self) -> list[int]:
        """Positions (in ``ops``) of the ops that apply parameters to values: products, convolutions, norms.

        Not those that work element by element: a bias belongs to the op before it, the learned weight of a loss to the
        loss. What is computed from parameters alone is as good as one.
        """
        capture = self.capture
        weights = {node for node in capture.graph.nodes if node.name in capture.parameters}
        fixed = {node for node in capture.graph.nodes if node.name in {**capture.buffers, **capture.constants}}
        found = list[int]()
        for i, node in enumerate(self.ops):
            sources = set(node.all_input_nodes)
            if sources.isdisjoint(weights):
                continue
            if sources <= weights | fixed:
                weights.add(node)
            elif not is_pointwise(node):
                found.append(i)
        return found

    def live_bytes(self) -> list[float | None]:
        """Return the bytes per example that cross a cut after each op; None where cutting is impossible.

        Not possible: between a tensor and a later in-place write to its memory, or a view with strides of its own
        (``as_strided``); where something other than a tensor crosses; where a shape is not a linear function of
        the batch.
        """
        # differences along positions: what op i makes and op j uses last crosses the cuts at i ... j - 1. The last
        # entry is the output's, which keeps alive what it returns
        last = self.last_use()
        change = [0.0] * (len(self.ops) + 1)
        forbidden = [0] * (len(self.ops) + 1)
        for i, node in enumerate(self.ops):
            if last[node] <= i:
                continue
            value = node.meta.get("val")
            if isinstance(value, Tensor) and linear_shape(value, self.sizes) is not None:
                change[i] += self.sizes.size_bytes(value, 1)
                change[last[node]] -= self.sizes.size_bytes(value, 1)
            else:
                forbidden[i] += 1
                forbidden[last[node]] -= 1
        for start, end in (*self._spans_in_memory(), *self._spans_together()):
            forbidden[start] += 1
            forbidden[end] -= 1
        return _curve(change[:-1], forbidden[:-1])

    def reading(self, nodes: Iterable[Node]) -> list[Node]:
        """Ops that read placeholders, themselves or through others that are rebuilt in every section."""
        found, seen = dict[Node, None](), set[Node]()
        stack = [node for node in nodes if node.op == "placeholder"]
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in self.rebuilt and user not in seen:
                    seen.add(user)
                    stack.append(user)
                elif user not in self.rebuilt and user.op != "output":
                    found[user] = None
        return list(found)

    def _spans_together(self) -> Iterable[tuple[int, int]]:
        """Spans of ops that must be in one section."""
        position = {node: i for i, node in enumerate(self.ops)}
        for first, last in self.together:
            places = [position[node] for node in (*first, *self.reading(first)) if node in position]
            if places:
                yield min(places), max((*places, *(position[node] for node in last if node in position)))

    def _spans_in_memory(self) -> Iterable[tuple[int, int]]:
        """Spans of ops within which a tensor's memory itself is used: written in place, or viewed by its strides."""
        first: dict[Hashable, int] = {}
        for i, node in enumerate(self.ops):
            viewed = node.all_input_nodes[:1] if op_name(node) == "aten::as_strided" else []
            used = {memory for each in (*written_arguments(node), *viewed) for memory in self.memory.of(each)}
            yield from ((first[memory], i) for memory in used if memory in first)
            for memory in self.memory.of(node):
                first.setdefault(memory, i)


def _curve(change: Sequence[float], forbidden: Sequence[int]) -> list[float | None]:
    live, blocked = 0.0, 0
    curve: list[float | None] = []
    for step, block in zip(change, forbidden, strict=True):
        live += step
        blocked += block
        curve.append(None if blocked else live)
    return curve


def is_pointwise(node: Node) -> bool:
    """Return whether the op works element by element."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def is_random(node: Node) -> bool:
    """Return whether the op, or a sub-graph that it runs, draws from the default generator."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return any(is_random(inner) for body in bodies_of(node) for inner in body.graph.nodes)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if op_name(node) == "aten::scaled_dot_product_attention":
        drop = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(drop != 0.0)
    if node.target.namespace in (FUNCTIONS, MODULES):
        return True  # an autograd Function may draw, and so may a module that runs eagerly
    return bool(torch.Tag.nondeterministic_seeded in node.target.tags)


def linear(size: object, sizes: Sizes) -> tuple[int, int] | None:
    """``(fixed, per_example)`` of one dimension; None if it is not linear in the batch."""
    # a line through batches of 1 and 2, tried at 4
    one, two, four = (sizes.dimension(size, batch) for batch in (1, 2, 4))
    return (2 * one - two, two - one) if four - two == 2 * (two - one) else None


def linear_shape(value: Tensor, sizes: Sizes) -> ShapeLines | None:
    """``(fixed, per_example)`` of each dimension; None if a dimension is not linear in the batch.

    Where sizes are open: linear in them, and ``per_example`` has the slopes of each dimension in turn.
    """
    if sizes.depends_on_data(value):
        return None
    if sizes.open_symbols:
        return _affine(value, sizes)
    found = [linear(size, sizes) for size in value.shape]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return ShapeLines(tuple(fixed for fixed, _ in known), tuple(slope for _, slope in known))


def _affine(value: Tensor, sizes: Sizes) -> ShapeLines | None:
    fixed, slopes = list[int](), list[tuple[int, ...]]()
    for size in value.shape:
        if not isinstance(size, torch.SymInt):
            fixed.append(size)
            slopes.append((0,) * len(sizes.open_symbols))
            continue
        expression = size.node.expr
        # slope of each size, and the rest: all must be whole numbers, else the shape is not linear
        mine = [expression.diff(symbol) for symbol in sizes.open_symbols]
        steps = (slope * symbol for slope, symbol in zip(mine, sizes.open_symbols, strict=True))
        rest = (expression - sum(steps)).expand()
        if not all(each.is_Integer for each in (*mine, rest)):
            return None
        fixed.append(int(rest))
        slopes.append(tuple(map(int, mine)))
    return ShapeLines(tuple(fixed), tuple(sizes.shape(value, 1)), tuple(slopes))
