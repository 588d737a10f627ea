"""Buffers that forward() writes: taken out of the graph, to be updated at commit in micro-batch order.

A section returns what its updates are computed from (the batch's own statistics); the update itself is a small
graph of its own, from old buffers and statistics to new buffers. Running statistics then depend on neither P nor
D: every micro-batch's statistics come from its F alone, and one order applies them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.core.errors import ModelError
from varuna.partition.graph.captured import Capture
from varuna.partition.graph.operations import op_name, sources_of
from varuna.partition.graph.shared_memory import NORMS_WITH_STATISTICS, SharedMemory, bodies_of, written_arguments
from varuna.partition.watching.explaining import line_of

aten = torch.ops.aten


Kind = Literal["sum", "mean", "rows", "same"]
"""A way to make a statistic of the whole batch: micro-batches' are added up, averaged by numbers of examples, or
joined in their order, or are all the same."""


@dataclass(frozen=True)
class BufferWrite:
    """The change that a micro-batch, or the whole batch, makes to some buffers."""

    buffers: tuple[str, ...]
    """the model's own names"""
    statistics: tuple[Node, ...]
    """nodes of the captured graph that it is computed from"""
    module: GraphModule
    """``(*buffers, *statistics) -> new buffers``; writes nothing that it is given"""
    kinds: tuple[Kind, ...] | None = None
    """ways to make each statistic of a batch from those of its micro-batches, in their order, for one update a step;
    None: an update for each micro-batch"""
    read: tuple[Node, ...] = ()
    """placeholders of buffers that forward() reads as they were before the step"""


@dataclass(frozen=True)
class Writes:
    """Buffers that forward() writes, by their placeholders."""

    read: frozenset[Node]
    """it also computes with them"""
    counted: tuple[Node, ...]
    """nothing but updates reads them"""
    normalised: frozenset[Node]
    """running statistics of normalisations"""


def find_writes(capture: Capture, results: Sequence[Node]) -> Writes:
    """Find what forward() writes, after bringing ``capture.graph`` into a form in which only buffers are written.

    Raises:
        ModelError: forward() writes a parameter or a constant.
    """
    # each rewrites one kind of write into writes to buffers; what is left of others, _written refuses
    _name_once(capture)
    _copy_results(capture)
    normalised = _take_statistics(capture)
    _copy_written_inputs(capture)
    found = _written(capture)
    inside = sources_of([*results, *(truth.node for truth in capture.truths)])
    read = frozenset(node for node in found if not inside.isdisjoint(_dependent(capture, [node])))
    counted = tuple(node for node in found if node not in read and node not in normalised)
    return Writes(read - normalised, counted, normalised)


def _written(capture: Capture) -> list[Node]:
    memory = SharedMemory(capture.graph)
    found = [node for node in capture.graph.find_nodes(op="placeholder") if memory.is_written(node)]
    for node in found:
        _check_writers(capture, node, memory.writers(node))
    return [node for node in found if node.users]  # one that _name_once has merged into another has none


def separate_updates(capture: Capture, results: Sequence[Node]) -> tuple[BufferWrite, ...]:
    """Take every write to a buffer that is left out of ``capture.graph``, for an update with each micro-batch.

    Raises:
        ModelError: a result depends on a buffer that forward() writes.
    """
    placeholders = _written(capture)  # anew: updates of the whole batch have been taken out since find_writes
    dependent = _dependent(capture, placeholders)
    _check_apart(capture, dependent, placeholders, results)
    updates = tuple(_update(capture, part, placeholders) for part in _components(dependent, placeholders))
    for node in reversed(dependent):  # users first: fx erases no node that is used
        capture.graph.erase_node(node)
    return updates


def _name_once(capture: Capture) -> None:
    """Let a buffer that several modules share be one placeholder, so that its updates are one, in their order."""
    first: dict[str, Node] = {}
    for node in capture.graph.find_nodes(op="placeholder"):
        name = capture.buffers.get(node.name)
        if name is not None and (same := first.setdefault(name, node)) is not node:
            node.replace_all_uses_with(same)


def _copy_results(capture: Capture) -> None:
    """Let operations with ``out=``, through which no gradient goes, make a result of their own, which is copied."""
    graph = capture.graph
    for node in list(graph.nodes):
        out = node.kwargs.get("out")
        functional = _without_out(node.target) if isinstance(out, Node) else None
        if functional is None:
            continue
        given = {name: value for name, value in node.kwargs.items() if name != "out"}
        with graph.inserting_before(node):
            made = graph.call_function(functional, node.args, given)
            copied = graph.call_function(aten.copy_.default, (out, made))
        made.meta = {**node.meta, "val": torch.clone(node.meta["val"])}
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)


def _without_out(target: object) -> torch._ops.OpOverload | None:
    """The overload that makes what another writes to ``out``."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments if each.name != "out"]
    packet = target.overloadpacket
    for name in packet.overloads():
        found: torch._ops.OpOverload = getattr(packet, name)
        if [(each.name, str(each.type)) for each in found._schema.arguments] == wanted:
            return found
    return None


def _check_writers(capture: Capture, node: Node, writers: Sequence[Node]) -> None:
    place = f" at {line}" if (line := _line_of_write(writers[0])) else ""
    if node.name in capture.parameters:
        raise ModelError(
            f"forward() writes the parameter {capture.parameters[node.name]} in place{place}. Let the optimizer's step "
            "write it; or Trainer(after_step=...), which runs after it and sees all parameters, frozen ones too, as "
            "for the moving average of a teacher; or write to a clone."
        )
    if node.name not in capture.buffers:
        raise ModelError(
            f"forward() writes a tensor that the model keeps as a plain attribute in place{place}. Register what a "
            "step changes as a buffer (register_buffer), or write to a clone."
        )
    if any(map(bodies_of, writers)):
        raise ModelError(
            f"forward() updates {capture.buffers[node.name]} within torch.autocast{place}. Varuna cannot take such an "
            "update out of there, and each micro-batch runs more than once. Pass precision= to Trainer in place of "
            "torch.autocast in forward(), or leave it before the layer that does this."
        )


def _line_of_write(node: Node) -> str | None:
    """The user's line that writes: that of the op, or of the first such op in the region that it runs."""
    inner = (each for body in bodies_of(node) for each in body.graph.nodes if written_arguments(each))
    return line_of(next(inner, node))


def batch_statistics(graph: Graph) -> list[Node]:
    """Ops that normalise over the examples of a micro-batch."""
    return [node for node in graph.nodes if op_name(node) == "aten::batch_norm" and node.args[5] is True]


def _take_statistics(capture: Capture) -> frozenset[Node]:
    """Let each normalisation write its batch's own statistics (momentum 1), from which other ops update the buffers."""
    graph, buffers = capture.graph, set[Node]()
    for node in list(graph.nodes):
        written = written_arguments(node) if op_name(node) in NORMS_WITH_STATISTICS else []
        # (input, weight, bias, 3: running mean, 4: running variance, 5: use the batch's own, 6: momentum, ...)
        momentum = node.args[6] if written else 0.0
        buffers.update(written)
        for position, buffer in zip((3, 4), written, strict=False):
            value = buffer.meta["val"]
            with graph.inserting_before(node):
                fresh = graph.call_function(
                    aten.new_zeros.default, (node.args[0], list(value.shape)), {"dtype": value.dtype}
                )
            fresh.meta = {**node.meta, "val": torch.zeros_like(value)}
            node.update_arg(position, fresh)
            # old * (1 - momentum) + fresh * momentum, as the norm itself computes it: with momentum 1, fresh is what
            # the batch alone gives, a statistic that needs no buffer
            with graph.inserting_after(node):
                kept = graph.call_function(aten.mul_.Tensor, (buffer, 1 - momentum))
            with graph.inserting_after(kept):
                added = graph.call_function(aten.add_.Tensor, (kept, fresh), {"alpha": momentum})
            kept.meta = added.meta = {"val": value}
        if written:
            node.update_arg(6, 1.0)
    return frozenset(buffers)


def _copy_written_inputs(capture: Capture) -> None:
    """Let forward() write to copies of samples, which belong to all sections, and of what it makes of numbers.

    A copy is made where its memory is first viewed or written: until then, the sample itself is read.
    """
    memory = SharedMemory(capture.graph)
    for node in capture.graph.find_nodes(op="placeholder"):
        if memory.is_written(node) and _is_fresh(capture, node):
            place = min(_in_memory(node, memory))
            with capture.graph.inserting_before(place):
                copy = capture.graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)  # what shared the sample's memory shares the copy's
            node.meta["val"] = torch.clone(node.meta["val"])
            for user in list(node.users):
                if user >= place:  # fx compares nodes by their place in the graph
                    user.replace_input_with(node, copy)


def _in_memory(placeholder: Node, memory: SharedMemory) -> list[Node]:
    """Ops whose values share the placeholder's memory, and those that write to it."""
    mine = memory.of(placeholder)
    sharing = (node for node in placeholder.graph.nodes if node.op not in ("placeholder", "output"))
    return [*memory.writers(placeholder), *(node for node in sharing if not mine.isdisjoint(memory.of(node)))]


def _is_fresh(capture: Capture, node: Node) -> bool:
    return node.name in capture.inputs or (node.name in capture.constants and "lifted_tensor" in node.name)


def _dependent(capture: Capture, placeholders: Iterable[Node]) -> list[Node]:
    """Ops that read a written buffer, in order."""
    found = set(placeholders)
    order = []
    for node in capture.graph.nodes:
        if node.op not in ("placeholder", "output") and any(source in found for source in node.all_input_nodes):
            found.add(node)
            order.append(node)
    return order


def _check_apart(
    capture: Capture, dependent: Sequence[Node], placeholders: Sequence[Node], results: Sequence[Node]
) -> None:
    inside = {*dependent, *placeholders}
    for node in dependent:
        outside = [target for target in written_arguments(node) if target not in inside]
        used = any(user not in inside for user in node.users)
        sizes = [s for s in node.all_input_nodes if s not in inside and not isinstance(s.meta.get("val"), Tensor)]
        if outside or used or sizes or node in results:
            behind = sources_of([node])
            name = next(capture.buffers[each.name] for each in placeholders if each in behind)
            raise ModelError(
                f"forward() updates {name} and also computes with it, in a way that Varuna cannot take apart. Write to "
                "a buffer of its own, which nothing else reads, and compute with it in Trainer(after_step=...), which "
                "runs once per step."
            )


def _components(dependent: Sequence[Node], placeholders: Sequence[Node]) -> list[list[Node]]:
    """Groups of ops that share no buffer, each in order."""
    group = {node: [node] for node in placeholders}
    for node in dependent:
        merged: list[Node] = []
        for source in node.all_input_nodes:
            if source in group and group[source] is not merged:
                merged.extend(each for each in group[source] if each not in merged)
        merged.append(node)
        for each in merged:
            group[each] = merged
    return list({id(group[node]): group[node] for node in placeholders}.values())


def _update(capture: Capture, part: Sequence[Node], placeholders: Sequence[Node]) -> BufferWrite:
    order = [node for node in capture.graph.nodes if node in set(part)]
    buffers = [node for node in order if node in placeholders]
    ops = [node for node in order if node not in buffers]
    statistics = list(dict.fromkeys(s for node in ops for s in node.all_input_nodes if s not in order))
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in (*buffers, *statistics)}
    for node in buffers:
        copies[node] = graph.call_function(aten.clone.default, (copies[node],))
    for node in ops:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in buffers))
    module = GraphModule(capture.owner, graph, class_name="Update")
    return BufferWrite(tuple(capture.buffers[node.name] for node in buffers), tuple(statistics), module)
