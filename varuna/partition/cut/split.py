"""Split a flat graph into sections: what each runs, takes, makes and sends.

Ops that depend on inputs and constants only are rebuilt in every section that needs them; model inputs
are read from the dataset by the section that uses them; everything else that is used after a cut crosses
it, and is relayed through sections that do not use it::

    position     0  1     2  3     4  5       cuts = [1, 3]: after these positions
    op           a  b  |  c  d  |  e  f       b is used by c and f, d by e
    section      0  0  |  1  1  |  2  2

    crossings    ()     (b,)     (b, d)       into section 0, 1, 2; section 1 relays b

    arguments of a section    takes, inputs, batch size, parameters, buffers, constants
    results of a section      makes, statistics, truths; the last one's makes are loss and metric sums
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.fx import Graph, GraphModule, Node

from varuna.core.errors import ModelError
from varuna.partition.cut.buffers import BufferWrite, Kind
from varuna.partition.graph.flow import Flow, is_random, linear_shape

BATCH_SIZE = "varuna_batch_size"
"""Name of the placeholder that carries the number of examples, in sections that need only that."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses cuts: its name, layout and whether a gradient comes back."""

    name: str
    dtype: torch.dtype
    fixed: tuple[int, ...]
    """shape at 0 examples: each dimension is ``fixed + per_example * batch``"""
    per_example: tuple[int, ...]
    differentiable: bool
    per_size: tuple[tuple[int, ...], ...] = ()
    """with open sizes: of each dimension, how much one more of each adds; ``per_example`` is about the shape of one"""

    def shape(self, batch: int, sizes: Sequence[int] = ()) -> tuple[int, ...]:
        """Shape for ``batch`` examples, or for open sizes; without those an estimate."""
        if self.per_size and sizes:
            slopes = (sum(map(operator.mul, each, sizes)) for each in self.per_size)
            return tuple(map(operator.add, self.fixed, slopes))
        if self.per_size:
            return tuple(
                each * batch if any(slopes) else each
                for each, slopes in zip(self.per_example, self.per_size, strict=True)
            )
        return tuple(base + slope * batch for base, slope in zip(self.fixed, self.per_example, strict=True))


@dataclass(frozen=True)
class BufferUpdate:
    """The change that the statistics of one micro-batch, or of the whole batch, make to buffers; applied at commit."""

    buffers: tuple[str, ...]
    statistics: tuple[str, ...]
    module: GraphModule
    """``(*buffers, *statistics) -> new buffers``; writes nothing that it is given. With ``kinds`` it is also given the
    number of examples of the batch"""
    kinds: tuple[Kind, ...] | None = None
    """ways to make each statistic of the batch from those of its micro-batches; None: an update for each micro-batch"""


@dataclass(frozen=True)
class SectionGraph:
    """One section: a module and the meaning of its arguments and results, in order."""

    index: int
    label: str
    module: GraphModule
    takes: tuple[str, ...]
    """crossing tensors that it reads"""
    inputs: tuple[str, ...]
    """keys of the batch that it reads"""
    needs_batch_size: bool
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    makes: tuple[str, ...]
    """crossing tensors that it produces; the last section returns loss, weight and metric sums instead"""
    random: bool
    """draws random numbers (dropout)"""
    statistics: tuple[Crossing, ...] = ()
    """further results, from which updates of buffers are computed, after those that it makes; F's count, never R's"""
    updates: tuple[BufferUpdate, ...] = ()
    """updates whose statistics are complete here"""
    kept: tuple[str, ...] = ()
    """buffers beside these that steps change, or that ``after_step`` computes with"""
    truths: tuple[str, ...] = ()
    """file and line of branches that went as they were captured if the last results, after statistics, are true"""

    @property
    def updated(self) -> tuple[str, ...]:
        """Names of buffers that are part of the section's state, above all those that its updates change."""
        return tuple(dict.fromkeys((*(name for update in self.updates for name in update.buffers), *self.kept)))


@dataclass(frozen=True)
class Split:
    """All sections, and what crosses the cut in front of each (index k: into section k; empty for 0)."""

    sections: tuple[SectionGraph, ...]
    crossings: tuple[tuple[Crossing, ...], ...]


def split(
    flow: Flow,
    cuts: Sequence[int],
    results: Sequence[Node],
    updates: Sequence[BufferWrite] = (),
    held: Mapping[int, Collection[str]] = MappingProxyType({}),
) -> Split:
    """Cut ``flow.ops`` after the positions ``cuts``; the last section returns ``results``.

    Args:
        flow: of the graph.
        cuts: ascending.
        results: of the graph.
        updates: of buffers.
        held: by section, names of parameters and buffers that are in its state besides those that it trains or updates.
    """
    ends = [*cuts, len(flow.ops) - 1]
    section_of: dict[Node, int] = {}
    start = 0
    for index, end in enumerate(ends):
        section_of.update(dict.fromkeys(flow.ops[start : end + 1], index))
        start = end + 1
    last_section = _last_sections(flow, section_of, results, len(ends) - 1)
    updates_of: dict[int, list[BufferWrite]] = {}
    for update in updates:
        reading = flow.reading(update.read)
        # the last section that makes a statistic or reads the buffers: only there all of them are known
        owner = max((section_of.get(node, 0) for node in (*update.statistics, *reading)), default=0)
        updates_of.setdefault(owner, []).append(update)
        for node in update.statistics:
            if node in section_of:
                last_section[node] = max(last_section[node], owner)
    crossing_into = tuple(
        tuple(
            _crossing(node, flow) for node in flow.ops if section_of[node] < index <= last_section[node] and index > 0
        )
        for index in range(len(ends))
    )
    graphs = []
    for index in range(len(ends)):
        own = [node for node in flow.ops if section_of[node] == index]
        made = [node for node in own if last_section[node] > index]
        made = made if index < len(ends) - 1 else list(results)
        graphs.append(section_graph(flow, index, own, made, updates_of.get(index, ()), held.get(index, ())))
    assert sum(len(graph.truths) for graph in graphs) == len(flow.capture.truths), "every branch is looked at"
    return Split(tuple(graphs), crossing_into)


def _last_sections(flow: Flow, section_of: dict[Node, int], results: Sequence[Node], final: int) -> dict[Node, int]:
    """Op -> last section that uses it, itself or through values that are rebuilt there."""
    last = dict(section_of)
    for node in flow.ops:
        for source in node.all_input_nodes:
            if source in last:
                last[source] = max(last[source], section_of[node])
    for node in results:
        if node in last:
            # loss and metrics are returned by the last section, wherever they were computed
            last[node] = final
    return last


def _crossing(node: Node, flow: Flow) -> Crossing:
    value = node.meta["val"]
    layout = linear_shape(value, flow.sizes)
    if layout is None:
        raise ModelError(
            f"{node} would have to be passed on, but its shape {list(value.shape)} is not linear in the batch"
        )
    fixed, per_example, per_size = layout
    return Crossing(node.name, value.dtype, fixed, per_example, node in flow.differentiable, per_size)


def _closure(own: Sequence[Node], results: Sequence[Node], flow: Flow) -> set[Node]:
    """Rebuilt ops (and sub-graphs) that ``own`` and ``results`` need."""
    needed: set[Node] = set()
    stack = [s for node in own for s in node.all_input_nodes] + list(results)
    while stack:
        node = stack.pop()
        if node not in needed and (node in flow.rebuilt or node.op == "get_attr"):
            needed.add(node)
            if flow.size_of(node) is None:  # else computed from the batch size, not from what it was read from
                stack.extend((*node.all_input_nodes, *flow.memory.writers(node)))
    return needed


class _Builder:
    """Copies nodes into a section's own graph and collects what it has to be given."""

    def __init__(self, flow: Flow, members: set[Node]) -> None:
        self.flow = flow
        self.members = members
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.arguments: dict[str, list[Node]] = {
            kind: [] for kind in ("takes", "inputs", "parameters", "buffers", "constants")
        }
        self.batch_size: Node | None = None

    def kind_of(self, node: Node) -> str:
        capture = self.flow.capture
        for kind in ("inputs", "parameters", "buffers", "constants"):
            if node.name in getattr(capture, kind):
                return kind
        return "takes"

    def declare(self, order: Sequence[Node], results: Sequence[Node], held: Sequence[Node]) -> None:
        """Declare placeholders: takes, inputs, batch size, parameters (also those only held), buffers, constants."""
        sources = [s for node in order if self.flow.size_of(node) is None for s in node.all_input_nodes]
        outside = dict.fromkeys(node for node in (*sources, *results, *held) if node not in self.members)
        for node in outside:
            self.arguments[self.kind_of(node)].append(node)
        wants_batch_size = any(self.flow.size_of(node) is not None for node in order)
        for kind in self.arguments:
            for node in self.arguments[kind]:
                self.copies[node] = self.graph.placeholder(node.name)
                self.copies[node].meta.update({"val": node.meta["val"]} if "val" in node.meta else {})
            if kind == "inputs" and wants_batch_size:
                self.batch_size = self.graph.placeholder(BATCH_SIZE)

    def copy(self, node: Node) -> None:
        size = self.flow.size_of(node)
        if size is None or self.batch_size is None:
            self.copies[node] = self.graph.node_copy(node, lambda source: self.copies[source])
            return
        fixed, slope = size
        value = self.batch_size if slope == 1 else self.graph.call_function(operator.mul, (self.batch_size, slope))
        self.copies[node] = value if fixed == 0 else self.graph.call_function(operator.add, (value, fixed))


def section_graph(
    flow: Flow,
    index: int,
    own: Sequence[Node],
    made: Sequence[Node],
    updates: Sequence[BufferWrite] = (),
    held: Collection[str] = (),
) -> SectionGraph:
    """Build the section that runs ``own``, rebuilds what it needs, and returns ``made``, statistics, truths."""
    statistics = list(dict.fromkeys(node for update in updates for node in update.statistics))
    mine = set(own)
    truths = [
        truth  # of inputs alone: it is rebuilt, belongs to no section, and is looked at by the first
        for truth in flow.capture.truths
        if truth.node in mine or (index == 0 and (truth.node in flow.rebuilt or truth.node.op == "placeholder"))
    ]
    results = [*made, *statistics, *(truth.node for truth in truths)]
    members = mine | _closure(own, results, flow)
    # members is a set: the captured order puts a write in place before what reads it
    order = [node for node in flow.capture.graph.nodes if node in members]
    builder = _Builder(flow, members)
    placeholders = {flow.capture.parameters.get(n.name): n for n in flow.capture.graph.find_nodes(op="placeholder")}
    # sorted: held may be a set, and every worker must have the same order of arguments
    builder.declare(order, results, [placeholders[name] for name in sorted(held) if name in placeholders])
    for node in order:
        builder.copy(node)
    builder.graph.output(tuple(builder.copies[node] for node in results))
    capture = flow.capture

    def names(kind: str) -> tuple[str, ...]:
        table = getattr(capture, kind)
        return tuple(table[node.name] for node in builder.arguments[kind])

    return SectionGraph(
        index=index,
        label=_label(own),
        module=GraphModule(capture.owner, builder.graph, class_name=f"Section{index}"),
        takes=tuple(node.name for node in builder.arguments["takes"]),
        inputs=names("inputs"),
        needs_batch_size=builder.batch_size is not None,
        parameters=names("parameters"),
        buffers=names("buffers"),
        constants=tuple(node.name for node in builder.arguments["constants"]),
        makes=tuple(node.name for node in made),
        random=any(is_random(node) for node in own),
        statistics=tuple(_crossing(node, flow) for node in statistics),
        updates=tuple(BufferUpdate(u.buffers, tuple(n.name for n in u.statistics), u.module, u.kinds) for u in updates),
        kept=tuple(name for name in sorted(held) if name not in placeholders),
        truths=tuple(truth.place for truth in truths),
    )


def _label(own: Sequence[Node]) -> str:
    """The module path that the section ends in, as the user knows it."""
    for node in reversed(own):
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = str(list(stack.values())[-1][0])
            return path.partition(".")[2] or "output"
    return "output"
