"""Assumptions that the branches of ``forward`` make, and its own assertions, found in an exported graph.

Export writes each branch down as an assertion, beside the user's own (``torch._assert_async``, ``torch._check``). One
that follows from the samples becomes part of the conditions, which are looked at before a micro-batch runs. One that
follows from activations becomes a truth: a tensor that the section returns in which it can be told. It is looked at
before the step's vote.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.capture.parameter_limits import LIMITED
from varuna.partition.graph.captured import Truth
from varuna.partition.graph.flow import is_random
from varuna.partition.graph.operations import closure, op_name
from varuna.partition.graph.sample_guards import Conditions
from varuna.partition.graph.shared_memory import SharedMemory
from varuna.partition.watching.explaining import line_of

aten = torch.ops.aten
_ASSERT = aten._assert_scalar.default
_ASYNC = "aten::_assert_async"
_NUMBERS = ("aten::item", "aten::_local_scalar_dense")
_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "neg", "truediv", "and_", "or_")
_ON_TENSORS: dict[Any, Any] = {
    **{getattr(operator, name): getattr(operator, name) for name in _OPERATORS},
    torch.sym_not: aten.logical_not.default,
    torch.sym_ite: aten.where.Scalar,
}
"""Python's operations on numbers, and the same on tensors of one element."""


class BranchAssumptions(NamedTuple):
    """Assumptions that the branches of one graph make."""

    conditions: Conditions | None
    """that every batch must meet"""
    truths: tuple[Truth, ...]
    """of activations"""
    unseen: tuple[str, ...] = ()
    """places of assertions of the user's that nothing can be made of"""


class _Sources(NamedTuple):
    inputs: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]


class _Past:
    """Nodes that values of a graph are computed from, with earlier writes into the memory that they read."""

    def __init__(self, graph: Graph) -> None:
        self.memory = SharedMemory(graph)

    def of(self, values: Sequence[Any]) -> set[Node]:
        """Everything that ``values`` are computed from, and the values themselves."""

        def behind(node: Node) -> list[Node]:
            # fx compares nodes by their place in the graph: a later write is not in what was read
            return [*node.all_input_nodes, *(each for each in self.memory.writers(node) if each < max(values))]

        return closure(values, behind)


def taken_for_granted(
    graph: Graph,
    owner: GraphModule,
    inputs: Mapping[str, str],
    buffers: Mapping[str, str],
    constants: Mapping[str, Tensor],
    *,
    places: Mapping[str, str],
    decided: Sequence[frozenset[str]],
    of_activations: bool,
    is_certain: bool,
) -> BranchAssumptions | None:
    """Find conditions and truths of an exported graph; None if something else was taken for granted as well.

    Args:
        graph: as exported, its assertions in place; truths are added to it.
        owner: holds the graphs of regions.
        inputs: placeholder -> key of the batch.
        buffers: placeholder -> name.
        constants: placeholder -> value.
        places: what export calls a number that it took out of a tensor -> the user's line that did.
        decided: such numbers, by decision that was made by their values.
        of_activations: branches may have been followed by them.
        is_certain: no branch was followed by values: all assertions are the user's own, or hold for sure.
    """
    bodies = [getattr(owner, str(node.target), None) for node in graph.nodes if node.op == "get_attr" and node.users]
    inner = [node for body in bodies if isinstance(body, GraphModule) for node in body.graph.nodes]
    if any(node.target is _ASSERT for node in inner) and not is_certain:
        return None  # in a region: nothing can be returned from there
    branches = [node for node in graph.nodes if node.target is _ASSERT and _says_something(node.args[0])]
    if is_certain:
        branches = [node for node in branches if not _names_of(node).isdisjoint(places)]
    said = [_names_of(node) for node in branches]
    if not all(any(numbers <= words for words in said) for numbers in decided):
        return None  # export writes nothing down of decisions on Python's floats
    known, past = {*inputs, *buffers, *constants}, _Past(graph)

    def follows_from_samples(node: Node) -> bool:
        order = past.of([node.args[0]])
        given = {each for each in order if each.op == "placeholder"}
        return all(each.name in known and not past.memory.is_written(each) for each in given) and not any(
            map(is_random, order)
        )

    asserted = [node for node in graph.nodes if node in branches or _is_own(node)]
    of_samples = [node for node in asserted if follows_from_samples(node)]
    others = [node for node in asserted if node not in of_samples]
    if not (of_activations or is_certain or all(map(_is_own, others))):
        return None
    truths, unseen = [], [_place(node, places) for node in inner if _is_own(node)]
    for node in others:
        truth = _truth(node, past, places)
        if truth is not None:
            truths.append(truth)
        elif is_certain or _is_own(node):
            unseen.append(_place(node, places))
        else:
            return None
    sources = _Sources(inputs, buffers, constants)
    conditions = _conditions(graph, owner, of_samples, sources, past, places) if of_samples else None
    return BranchAssumptions(conditions, tuple(truths), tuple(dict.fromkeys(unseen)))


def _is_own(node: Node) -> bool:
    """Return whether an assertion is the user's own, of a tensor."""
    is_async = op_name(node) == _ASYNC and isinstance(node.args[0], Node)
    return is_async and not str(node.args[-1]).startswith(LIMITED)


def _names_of(node: Node) -> set[str]:
    """Names of the numbers in an assertion."""
    return set(re.findall(r"\w+", str(node.args[1])))


def _says_something(condition: object) -> bool:
    """Return whether a condition says more than that a number made of a truth is 0 or 1."""
    if not isinstance(condition, Node) or condition.target not in (operator.ge, operator.le):
        return isinstance(condition, Node)
    return not (isinstance(condition.args[0], Node) and condition.args[0].target is torch.sym_ite)


def _conditions(
    graph: Graph,
    owner: GraphModule,
    asserted: Sequence[Node],
    sources: _Sources,
    past: _Past,
    lines: Mapping[str, str],
) -> Conditions:
    truths: list[Any] = [node.args[0] for node in asserted]
    needed = past.of(truths)
    order = [node for node in graph.nodes if node in needed]
    given = [node for node in order if node.op == "placeholder"]
    kinds = [[node for node in given if node.name in kind] for kind in sources]
    made = Graph()
    copies = {node: made.placeholder(node.name) for kind in kinds for node in kind}
    for node in order:
        if node not in copies:
            copies[node] = made.node_copy(node, lambda source: copies[source])
    made.output(tuple(copies[node] for node in truths))
    return Conditions(
        module=GraphModule(owner, made, class_name="Conditions"),
        inputs=tuple(sources.inputs[node.name] for node in kinds[0]),
        buffers=tuple(sources.buffers[node.name] for node in kinds[1]),
        constants=tuple(sources.constants[node.name] for node in kinds[2]),
        places=tuple(_place(node, lines) for node in asserted),
    )


def _truth(asserted: Node, past: _Past, lines: Mapping[str, str]) -> Truth | None:
    """The assertion as a tensor; None if it depends on random numbers alone, or cannot be one."""
    condition = asserted.args[0]
    assert isinstance(condition, Node), "an assertion of a constant is not a condition"
    order = past.of([condition])
    if any(map(is_random, order)) and not any(node.op == "placeholder" for node in order):
        return None  # a coin: it falls the other way in the next micro-batch
    if _is_own(asserted):
        with asserted.graph.inserting_before(asserted):
            single = _call(asserted.graph, aten.reshape.default, (condition, []), condition)
            return Truth(_call(asserted.graph, aten.ne.Scalar, (single, 0), condition), _place(asserted, lines))
    found = _as_tensor(condition, asserted, {})
    return None if found is None else Truth(found, _place(asserted, lines))


def _as_tensor(node: Node, before: Node, known: dict[Node, Node | None]) -> Node | None:
    """Compute with tensors what Python computes from their numbers; None if that is impossible."""
    if node not in known:
        known[node] = _made(node, before, known)
    return known[node]


def _made(node: Node, before: Node, known: dict[Node, Node | None]) -> Node | None:
    graph = node.graph
    if op_name(node) in _NUMBERS:
        source = node.args[0]
        assert isinstance(source, Node), "a number comes out of a tensor"
        with graph.inserting_before(before):
            single = _call(graph, aten.reshape.default, (source, []), source)
            exact = source.meta["val"].is_floating_point()
            # Python's floats have 64 bits: rounded to fewer, a comparison could go the other way
            return _call(graph, aten.to.dtype, (single, torch.float64), source) if exact else single
    target = _ON_TENSORS.get(node.target)
    if target is None or node.kwargs:
        return None
    args = [_as_tensor(arg, before, known) if isinstance(arg, Node) else arg for arg in node.args]
    if any(arg is None for arg in args):
        return None
    with graph.inserting_before(before):
        return _call(graph, target, tuple(args), next(arg for arg in args if isinstance(arg, Node)))


def _call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    node = graph.call_function(target, args)
    value = target(*[arg.meta["val"] if isinstance(arg, Node) else arg for arg in args])
    node.meta = {**like.meta, "val": value}
    return node


def _place(asserted: Node, lines: Mapping[str, str]) -> str:
    """The user's line that took the asserted number out of a tensor."""
    if _is_own(asserted):
        return f"{line_of(asserted) or 'an unknown line'} (an assertion)"
    names = [name for name in re.findall(r"\w+", str(asserted.args[1])) if name in lines]
    return lines[names[-1]] if names else _line_before(asserted) or "an unknown line"


def _line_before(node: Node) -> str | None:
    """The line of the nearest operation that a node is computed from: of a size that depends on data."""
    near, seen = [node], {node}
    for each in near:
        if (line := line_of(each)) is not None:
            return line
        near += [source for source in each.all_input_nodes if source not in seen]
        seen.update(each.all_input_nodes)
    return None
