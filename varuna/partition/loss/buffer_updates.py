"""Buffers that forward() reads as well as writes, or counts in: one update a step, from the whole batch, at the commit.

Every micro-batch reads the values from before the step, and writes to copies of its own. What the step makes of them is
a small graph over statistics of the whole batch: sums and means over examples, which micro-batches add up, rows of each
example, which they join, and what is the same in all of them. It gives what plain PyTorch makes of the batch at once.
"""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from varuna.core.errors import ModelError
from varuna.partition.cut.buffers import BufferWrite, Kind
from varuna.partition.cut.split import BATCH_SIZE
from varuna.partition.graph.captured import Capture
from varuna.partition.graph.costs import Sizes
from varuna.partition.graph.flow import is_random, linear
from varuna.partition.graph.operations import closure, op_name, sources_of
from varuna.partition.graph.shared_memory import SharedMemory, bodies_of
from varuna.partition.loss.batch_dimension import EXAMPLES, ONE, BatchConstant, Fixed, Rows, Total, carriers
from varuna.partition.loss.mixing import Tracking, needed_by
from varuna.partition.loss.terms import RULES, place_of

aten = torch.ops.aten

WAY_OUT = (
    "Let forward() leave in a buffer what the update needs of the batch, such as a sum over its examples "
    "(self.sum.add_(x.sum(0))), and compute the update in Trainer(after_step=...), which runs once per step, after the "
    "optimizer, with all parameters and buffers."
)
_NUMBER = (
    "makes a Python number or a branch of it, which is captured once (a queue needs none: "
    "self.queue.copy_(torch.cat([new, self.queue])[:size]))"
)
_COUNTS = ("aten::histc",)
"""Counts of elements: what micro-batches count adds up."""


def updates_of_whole_batch(
    capture: Capture, buffers: Sequence[Node], results: Sequence[Node], *, required: frozenset[Node]
) -> tuple[BufferWrite, ...]:
    """Take writes to buffers out of the graph, which then reads them as they were before the step.

    Args:
        capture: its graph is changed.
        buffers: placeholders that forward() writes.
        results: of the graph.
        required: of these, the buffers that cannot be updated in another way.

    Returns:
        The updates. Writes that do not follow from statistics stay in the graph, but for those to required buffers.

    Raises:
        ModelError: what becomes of a required buffer does not follow from statistics of the batch, or a result depends
            on what was written.
    """
    if not buffers:
        return ()
    # a copy in front of all ops, and one behind them: between the two lies the update
    copies = {_copied(capture, node): node for node in buffers}
    output = next(node for node in capture.graph.nodes if node.op == "output")
    finals = {copy: _clone(capture, copy, before=output) for copy in copies}
    tracking = Tracking(capture, list(finals.values()), RULES)
    memory = SharedMemory(capture.graph)
    parts: list[_Part] = []
    for copy, final in finals.items():
        part = _Part(capture, copies, tracking, memory)
        try:
            part.add(copy, final)
            part.check_results(results)
        except _NotStatisticsError as error:
            if copies[copy] in required:
                raise _refusal(capture, copies[copy], error) from None
            # as before: the buffer itself is written, an update for each micro-batch (cut.buffers.separate_updates)
            capture.graph.erase_node(final)
            copy.replace_all_uses_with(copies[copy])
            copies[copy].meta["val"] = copy.meta["val"]
            capture.graph.erase_node(copy)
            continue
        # buffers that one update reads and another writes are one update
        joined = [each for each in parts if each.meets(part)]
        for each in joined:
            part.join(each)
        parts = [*(each for each in parts if each not in joined), part]
    updates = tuple(part.write(finals) for part in parts)
    read = [*results, *(node for update in updates for node in update.statistics)]
    _erase(capture, {node for part in parts for node in part.inside}, read)
    return updates


class _NotStatisticsError(Exception):
    """An update needs more of the batch than statistics; ``node`` is the operation."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node = node


class _Part:
    """The update of some buffers: operations on statistics."""

    def __init__(self, capture: Capture, copies: Mapping[Node, Node], tracking: Tracking, memory: SharedMemory) -> None:
        self._capture, self._copies, self._t, self._memory = capture, copies, tracking, memory
        self._order = {node: place for place, node in enumerate(capture.graph.nodes)}
        self._sizes = Sizes(capture.batch_symbol)
        self._held = {each: copy for copy in copies for each in memory.of(copy)}
        self._finals: dict[Node, Node] = {}
        self.inside = set[Node]()
        """operations of the update"""
        self._statistics: dict[Node, Kind] = {}

    def add(self, copy: Node, final: Node) -> None:
        """Find what the final value of a buffer follows from.

        Raises:
            _NotStatisticsError: it is no graph over statistics.
        """
        self._finals[copy] = final
        sources = needed_by(self._capture.graph, [final])
        given = {each for each in sources if each.op == "placeholder"}
        if isinstance(self._t.of(final), Fixed) and not given <= set(self._copies.values()):
            self._refuse_draws(sources)
            self._statistics[final] = "same"
        else:
            self.inside.add(final)
            self._take_all(final)

    def meets(self, other: "_Part") -> bool:
        """Return whether both compute with the same buffers."""
        return not self._buffers().isdisjoint(other._buffers())

    def join(self, other: "_Part") -> None:
        """Add another part's buffers."""
        self._finals.update(other._finals)
        self.inside |= other.inside
        self._statistics.update(other._statistics)

    def _buffers(self) -> set[Node]:
        inside = (self._copy_of(node) for node in self.inside)
        return {*self._finals, *(copy for copy in inside if copy is not None)}

    # -- what an update follows from -----------------------------------------------------------------------

    def _take_all(self, node: Node) -> None:
        stack = [*node.all_input_nodes, *self._memory.writers(node)]
        while stack:
            each = stack.pop()
            if each in self.inside or each in self._statistics:
                continue
            kind = self._kind(each)
            if kind is not None:
                self._statistics[each] = kind
                continue
            self.inside.add(each)
            stack += self._memory.writers(each)
            if each not in self._copies and self._size(each) is None:
                self._check_inside(each)
                stack += each.all_input_nodes

    def _kind(self, node: Node) -> Kind | None:
        """Return how micro-batches make a value of the whole batch; None: it is computed from such values."""
        if node.op == "get_attr" or self._copy_of(node) is not None or self._size(node) is not None:
            return None
        if not isinstance(node.meta.get("val"), torch.Tensor) or not self._is_steady(node):
            return None
        state = self._t.of(node)
        if isinstance(state, Fixed):
            given = {each for each in sources_of([node]) if each.op == "placeholder"}
            if given and given <= set(self._copies.values()):
                return None
            self._refuse_draws(needed_by(self._capture.graph, [node]))
            return "same"
        if isinstance(state, Rows):
            return "rows" if self._is_in_turn(node, state) else None
        # the first value without examples: where they were added up, not what was computed of the sum
        rows = [found for each in node.all_input_nodes if isinstance(found := self._t.of(each), Rows)]
        if not rows or any(each.blames or each.by_fact for each in rows) or carriers(node.meta["val"]):
            return None
        # with equal ends, histc takes its range from the values, so from the micro-batch
        if op_name(node) in _COUNTS and len(node.args) > 3 and node.args[2] != node.args[3]:
            return "sum"
        if isinstance(state, Total):
            return "sum" if state.counts == {ONE} else "mean" if state.counts == {EXAMPLES} else None
        if isinstance(state, BatchConstant) and op_name(node) in ("aten::sum", "aten::mean"):
            return "mean" if op_name(node) == "aten::mean" else "sum"
        return None

    def _is_in_turn(self, node: Node, state: Rows) -> bool:
        """Return whether examples follow each other along the first dimension, each value of one example alone."""
        value = node.meta["val"]
        # micro-batches' rows are joined along dimension 0: that is the batch's order if each example's lie together
        in_turn = state.order is None or (state.order.outer == 1 and state.order.picked is None)
        slope = linear(value.shape[0], self._sizes) if value.dim() else None
        whole = slope is not None and slope[0] == 0
        return in_turn and whole and state.dim == -value.dim() and not state.blames and not state.by_fact

    def _is_steady(self, node: Node) -> bool:
        """Return whether nothing writes to the value after it was made."""
        return all(self._order[writer] <= self._order[node] for writer in self._memory.writers(node))

    def _size(self, node: Node) -> tuple[int, int] | None:
        """``(fixed, per example)`` of a size that follows from the number of examples."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or not value.node.expr.free_symbols <= {self._capture.batch_symbol}:
            return None
        return linear(value, self._sizes)

    def _copy_of(self, node: Node) -> Node | None:
        """The copy of a buffer in whose memory a value lies."""
        return next((self._held[each] for each in self._memory.of(node) if each in self._held), None)

    def _check_inside(self, node: Node) -> None:
        self._refuse_draws([node])
        state = self._t.states.get(node)
        states = [self._t.of(each) for each in node.all_input_nodes]
        parameters = [each for each in node.all_input_nodes if each.name in self._capture.parameters]
        if node.op == "placeholder" or (parameters and any(isinstance(each, Rows) for each in states)):
            raise _NotStatisticsError(node, "needs the activations of the whole batch at once")
        if bodies_of(node) or (state is None and not isinstance(node.meta.get("val"), torch.Tensor)):
            raise _NotStatisticsError(node, "is not computed by operations on tensors")

    @staticmethod
    def _refuse_draws(nodes: Iterable[Node]) -> None:
        drawn = next((node for node in nodes if is_random(node)), None)
        if drawn is not None:
            raise _NotStatisticsError(drawn, "draws at random, in each micro-batch anew")

    def check_results(self, results: Sequence[Node]) -> None:
        """Check that nothing but updates reads what micro-batches have written to their copies.

        Raises:
            _NotStatisticsError: the loss would follow from one micro-batch where plain PyTorch takes the whole batch.
        """
        for truth in self._capture.truths:
            if not self._finals.keys().isdisjoint(sources_of([truth.node])):
                raise _NotStatisticsError(truth.node, _NUMBER)
        read = sources_of([*results, *self._statistics])
        for copy in self._finals:
            writers = self._memory.writers(copy)
            first = next((w for w in writers if any(not self._is_fixed(s) for s in w.all_input_nodes)), None)
            for node in self._capture.graph.nodes if first is not None else ():
                if node not in read or self._order[node] <= self._order[first]:
                    continue
                if any(self._copy_of(each) is copy for each in node.all_input_nodes):
                    raise _NotStatisticsError(node, "reads it after it was written from the batch")

    def _is_fixed(self, node: Node) -> bool:
        return self._copy_of(node) is not None or isinstance(self._t.of(node), Fixed)

    # -- the update ----------------------------------------------------------------------------------------

    def write(self, finals: Mapping[Node, Node]) -> BufferWrite:
        """Make the update's graph, and let the captured one return its statistics."""
        graph, capture = Graph(), self._capture
        # sets have no order: by place in the graph, so that all workers have the same arguments
        mine = sorted(self._buffers(), key=self._order.__getitem__)
        given = {copy: graph.placeholder(self._copies[copy].name) for copy in mine}
        statistics = {node: self._returned(node) for node in sorted(self._statistics, key=self._order.__getitem__)}
        made: dict[Node, Any] = {node: graph.placeholder(node.name) for node in statistics}
        batch = graph.placeholder(BATCH_SIZE)
        for node in statistics:
            if self._memory.is_written(node):
                made[node] = graph.call_function(aten.clone.default, (made[node],))
        for node in sorted(self.inside | set(mine), key=self._order.__getitem__):
            if node in given:
                made[node] = graph.call_function(aten.clone.default, (given[node],))
            elif (size := self._size(node)) is not None:
                times = graph.call_function(operator.mul, (batch, size[1]))
                made[node] = graph.call_function(operator.add, (times, size[0]))
            else:
                made[node] = graph.node_copy(node, lambda source: made[source])
        graph.output(tuple(made[finals[copy]] for copy in mine))
        return BufferWrite(
            buffers=tuple(capture.buffers[self._copies[copy].name] for copy in mine),
            statistics=tuple(statistics.values()),
            module=GraphModule(capture.owner, graph, class_name="Update"),
            kinds=tuple(self._statistics[node] for node in statistics),
            read=tuple(self._copies[copy] for copy in mine),
        )

    def _returned(self, node: Node) -> Node:
        """The value as it was made, although something may write to it afterwards."""
        if node.op == "placeholder" or not self._memory.is_written(node):
            return node
        return _clone(self._capture, node, before=node.next)


def _copied(capture: Capture, node: Node) -> Node:
    """Let forward() write to a copy of a buffer."""
    users = list(node.users)
    first = next(each for each in capture.graph.nodes if each.op != "placeholder")
    with capture.graph.inserting_before(first):
        copy = capture.graph.call_function(aten.clone.default, (node,))
    copy.meta = dict(node.meta)  # what shared the buffer's memory shares the copy's
    node.meta["val"] = torch.clone(node.meta["val"])
    for user in users:
        user.replace_input_with(node, copy)
    return copy


def _clone(capture: Capture, node: Node, *, before: Node) -> Node:
    with capture.graph.inserting_before(before):
        made = capture.graph.call_function(aten.clone.default, (node,))
    made.meta = {**node.meta, "val": torch.clone(node.meta["val"])}
    return made


def _erase(capture: Capture, inside: Collection[Node], results: Sequence[Node]) -> None:
    """Erase operations of updates that nothing else reads; writes into memory that is read afterwards stay."""
    memory = SharedMemory(capture.graph)
    order = {node: place for place, node in enumerate(capture.graph.nodes)}
    output = next(node for node in capture.graph.nodes if node.op == "output")

    def behind(node: Node) -> list[Node]:
        writers = (each for source in node.all_input_nodes for each in memory.writers(source))
        return [*node.all_input_nodes, *(each for each in writers if order[each] < order[node])]

    needed = closure([output, *results], behind)
    for node in sorted(inside, key=order.__getitem__, reverse=True):
        if node not in needed and node.op != "placeholder" and not node.users:
            capture.graph.erase_node(node)


def _refusal(capture: Capture, buffer: Node, error: _NotStatisticsError) -> ModelError:
    name, where = capture.buffers[buffer.name], place_of(error.node)
    at = f" at {where}" if where else ""
    return ModelError(
        f"forward() reads the buffer {name} and writes it, so the next step reads what this one writes. Varuna runs a "
        "batch in micro-batches, which all read it as it was before the step, and updates it once from sums, means and "
        f"rows of the whole batch. This update needs more: {op_name(error.node) or error.node}{at} {error}. {WAY_OUT}"
    )
