"""Values of a graph that share memory: an operation that writes to one of them in place changes the others.

The tensors of the capture say so: values that shared a storage there do whenever the graph runs. Some operations return
what they were given, or else a copy of it (``reshape``, ``to``, a dropout of zero): such values may share memory.
"""

import operator
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.graph.operations import flat, op_name

NORMS_WITH_STATISTICS = ("aten::batch_norm", "aten::instance_norm")
"""Write their running statistics (arguments 3 and 4) where argument 5 is true: no schema says so."""
_AS_GIVEN = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}
"""May return their argument itself, although neither schema nor fake tensors say so."""


class SharedMemory:
    """The memories of a graph: a value lies in one, and the several values of an operation in one each.

    Args:
        graph: with the tensors of its capture; later changes of the graph are not seen.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Hashable, Hashable] = {}
        self._held: dict[Node, tuple[Hashable, ...]] = {}
        written: list[tuple[Hashable, Node]] = []
        for node in graph.nodes:
            self._held[node] = _storages(node)
            for source in _may_be(node):
                # with several tensors on a side, only captured storages tell which may be which
                if "val" not in node.meta or len(self._held[node]) == len(self._held[source]) == 1:
                    self._join(self._held[node][0], self._held[source][0])
            if op_name(node) != "aten::detach_":  # which only touches autograd
                written += [(each, node) for target in written_arguments(node) for each in self._held[target]]
        self._writers: dict[Hashable, list[Node]] = {}
        for memory, node in written:
            self._writers.setdefault(self._root(memory), []).append(node)

    def _root(self, memory: Hashable) -> Hashable:
        while (above := self._parent.get(memory, memory)) != memory:
            memory = above
        return memory

    def _join(self, one: Hashable, other: Hashable) -> None:
        self._parent[self._root(one)] = self._root(other)

    def of(self, node: Node) -> set[Hashable]:
        """Memories of a value, equal for values that may share one."""
        return {self._root(each) for each in self._held.get(node, (node,))}

    def writers(self, node: Node) -> list[Node]:
        """Operations that write to the memory of a value in place, in order."""
        found = [each for memory in self.of(node) for each in self._writers.get(memory, ())]
        # fx compares nodes by their place in the graph
        return found if len(found) < 2 else sorted(dict.fromkeys(found))

    def is_written(self, node: Node) -> bool:
        """Return whether anything writes to the memory of a value."""
        return not self._writers.keys().isdisjoint(self.of(node))

    def share_memory(self, one: Node, other: Node) -> bool:
        """Return whether both values lay in one memory when they were captured."""
        return self._held.get(one, (one,)) == self._held.get(other, (other,))


def written_arguments(node: Node) -> list[Node]:
    """Arguments that the op writes in place: by its schema, or as normalisations write running statistics."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _written_in_bodies(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if op_name(node) in NORMS_WITH_STATISTICS:
        return [source for source in node.args[3:5] if isinstance(source, Node)] if node.args[5] is True else []
    return _arguments(node, only_written=True)


def bodies_of(node: Node) -> list[GraphModule]:
    """Sub-graphs that a higher-order op is given."""
    owner = node.graph.owning_module
    found = [getattr(owner, str(source.target), None) for source in node.all_input_nodes if source.op == "get_attr"]
    return [body for body in found if isinstance(body, GraphModule)]


def _written_in_bodies(node: Node) -> list[Node]:
    """Arguments to which a sub-graph writes; all of them where it is unknown which is which."""
    written: list[Node] = []
    for body in bodies_of(node):
        memory = SharedMemory(body.graph)
        inner = body.graph.find_nodes(op="placeholder")
        given = [each for each in flat(node.args) if each.op != "get_attr"]
        if any(map(memory.is_written, inner)):
            known = zip(given, inner, strict=True) if len(given) == len(inner) else None
            written += given if known is None else [outer for outer, each in known if memory.is_written(each)]
    return list(dict.fromkeys(written))


def _storages(node: Node) -> tuple[Hashable, ...]:
    """The captured storages of the tensors that a node stands for; itself, where there are none."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    found = (_storage(each) for each in values if isinstance(each, Tensor))
    return tuple(dict.fromkeys(each for each in found if each is not None)) or (node,)


def _storage(value: Tensor) -> Hashable | None:
    return value.untyped_storage()._cdata if value.layout is torch.strided else None


def _may_be(node: Node) -> Iterable[Node]:
    """Arguments that a node may return, or a view of them."""
    if node.target is operator.getitem:
        sources = node.all_input_nodes[:1] if "val" not in node.meta else []
    elif not isinstance(node.target, torch._ops.OpOverload):
        sources = []
    elif op_name(node) in _AS_GIVEN:
        sources = flat(node.args[:1])
    elif any(each.alias_info is not None for each in node.target._schema.returns):
        sources = _arguments(node)
    else:
        sources = []
    return [each for each in sources if _dtype(each) == _dtype(node)]


def _arguments(node: Node, *, only_written: bool = False) -> list[Node]:
    """Arguments, those in lists too, that the op's schema names as what it returns, or as what it writes."""
    found: list[Node] = []
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not only_written):
            found += flat([value])
    return found


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None
