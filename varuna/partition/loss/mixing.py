"""Operations of a graph that mix the examples of a batch: found in the graph, whatever the numbers are.

Every value is followed from the inputs: along which dimension the examples lie, also where it was flattened or put in
another order; and once there is none any more, whether it is a sum over the examples, a mean, or something that no sum
of parts gives. An operation that is not known may mix: what it makes is doubted, and running it decides.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from varuna.data.columns import STEP
from varuna.partition.graph.captured import Capture
from varuna.partition.graph.flow import is_random
from varuna.partition.graph.operations import closure, flat, op_name
from varuna.partition.graph.shared_memory import SharedMemory, written_arguments
from varuna.partition.loss.batch_dimension import (
    EXAMPLES,
    IN_TURN,
    ONE,
    BatchConstant,
    Blames,
    Count,
    Fixed,
    MixingSource,
    RowOrder,
    Rows,
    State,
    Total,
    Uniform,
    carriers,
    joined,
    multiple_of,
)

Found = State | tuple[State, ...]
Rule = Callable[["Tracking", Node], Found]

FOR_EACH = "uses a sum or mean over the batch for each example"
COMPARES = "compares the examples of a batch with each other"
PLACES = "takes examples by their place in the batch"
NO_SUM = "computes something from sums or means over the batch that is not itself a sum over examples"
PRODUCT = "multiplies sums or means over the batch with each other"
DIVIDES = "divides by a sum over the batch that depends on activations"
DRAWN = "divides by a sum over the batch that is drawn at random"
CHOOSES = "chooses among all examples of the batch"
UNKNOWN = "may mix the examples of a batch"


class Tracking:
    """States of all values that results of the graph follow from."""

    def __init__(self, capture: Capture, results: Sequence[Node], rules: dict[str, Rule]) -> None:
        self.batch = capture.batch_symbol
        self._capture, self._rules = capture, rules
        self._memory = SharedMemory(capture.graph)
        self.states: dict[Node, Found] = {}
        self.fact_users: set[Node] = set()
        """operations that have one value for each example, and use a fact of the batch for it"""
        self.operands: dict[Node, Rows] = {}
        """sums over the batch of values whose examples may have been mixed before"""
        self.divisors: set[Node] = set()
        """drawn at random"""
        self.undecided: set[MixingSource] = set()
        """no value for each example comes after them, which could tell whether examples have been mixed"""
        needed = needed_by(capture.graph, results)
        for node in capture.graph.nodes:  # in order: what a value is made of has its state before
            if node in needed:
                self.states[node] = self._follow(node)
                self._write(node)

    def of(self, argument: object) -> State:
        """State of an argument; a Python number is fixed."""
        found = self.states.get(argument, Fixed(given=True)) if isinstance(argument, Node) else Fixed(given=True)
        return found[0] if isinstance(found, tuple) else found

    def blame(self, node: Node, what: str, *states: State, certain: bool = True) -> Blames:
        """Blames of the states, or a new one."""
        return joined(*states) or (MixingSource(node, what, certain),)

    def is_step(self, argument: object) -> bool:
        """Return whether an argument is the number of the step, which all examples of a batch have alike."""
        return isinstance(argument, Node) and self._capture.inputs.get(argument.name) == STEP

    def is_drawn(self, node: Node) -> bool:
        """Return whether a value follows from inputs and random numbers alone, without parameters."""
        return not any(each.name in self._capture.parameters for each in needed_by(self._capture.graph, [node]))

    def _follow(self, node: Node) -> Found:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return Fixed(given=True)
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return (
                BatchConstant() if value.node.expr.free_symbols <= {self.batch} else Uniform(self.blame(node, UNKNOWN))
            )
        if node.target is operator.getitem:
            found = self.states[node.args[0]]  # type: ignore[index]
            return found[node.args[1]] if isinstance(found, tuple) else found  # type: ignore[index]
        found = self._rule(node)(self, node)
        if isinstance(found, Rows) and isinstance(value, Tensor) and found.dim not in carriers(value):
            found = Uniform(self.blame(node, UNKNOWN, found, certain=False))  # the examples lie nowhere any more
        if is_random(node) or self._memory.is_written(node):
            # counts are computed apart from the step, before it: a draw or a write would give them other values
            found = _ungiven(found)
        return found

    def _rule(self, node: Node) -> Rule:
        name = op_name(node).removeprefix("aten::")
        rule = self._rules.get(name) or self._rules.get(name.removesuffix("_"))
        if rule is not None:
            return rule
        tags = getattr(node.target, "tags", ())
        return pointwise if torch.Tag.pointwise in tags else unknown

    def _placeholder(self, node: Node) -> State:
        if node.name in self._capture.inputs:
            return Rows(-node.meta["val"].dim(), IN_TURN, given=True)  # dimension 0, counted from the last
        return Fixed(given=node.name not in self._capture.parameters and not self._memory.is_written(node))

    def _write(self, node: Node) -> None:
        """Give what an operation writes in place its state from then on, and adapt what shares that memory."""
        for target in written_arguments(node):
            found = self.states[node]
            state = found[0] if isinstance(found, tuple) else found
            if target.op == "placeholder":
                continue  # running statistics
            earlier = [each for each in self.states if not self._memory.of(each).isdisjoint(self._memory.of(target))]
            for each in earlier:
                if each is not node and any(user not in self.states for user in each.users):  # else nothing reads it
                    self.states[each] = state if each is target else self._partly(each, state)

    def _partly(self, base: Node, state: State) -> State:
        """State of a value, a part of which has become ``state``."""
        before, dims = self.of(base), carriers(base.meta.get("val"))
        if isinstance(before, Rows) and isinstance(state, Rows | Fixed):
            order = before.order or getattr(state, "order", None)
            by_fact = before.by_fact or getattr(state, "by_fact", False)
            blames = joined(before, state)
            return replace(before, order=order, given=False, blames=blames, by_fact=by_fact, number=False)
        if isinstance(before, Fixed) and isinstance(state, Fixed):
            return Fixed(before.given and state.given)
        blames = self.blame(base, UNKNOWN, before, state, certain=False)
        return Rows(dims[0], IN_TURN, False, blames) if dims else Uniform(blames)


def needed_by(graph: Graph, results: Iterable[Node]) -> set[Node]:
    """Nodes that the results follow from, and those that write into them."""
    memory = SharedMemory(graph)
    return closure(results, lambda node: [*node.all_input_nodes, *memory.writers(node)])


def _ungiven(found: Found) -> Found:
    if isinstance(found, tuple):
        return tuple(_ungiven(each) for each in found)  # type: ignore[misc]
    if isinstance(found, Rows):
        return replace(found, given=False, number=False)
    if isinstance(found, Fixed):
        return Fixed(given=False)
    return Total(frozenset({ONE})) if isinstance(found, BatchConstant) else found


def operands(node: Node) -> list[Node]:
    """Tensors among the arguments; not sizes."""
    found = flat((*node.args, *node.kwargs.values()))
    return [each for each in found if not isinstance(each.meta.get("val"), torch.SymInt)]


def meet(t: Tracking, node: Node, sources: Iterable[Node], *, dim: int | None = None) -> Rows:
    """State of an operation on several values, some of which have one element for each example.

    Args:
        t: knows their states.
        node: the operation.
        sources: its operands, aligned from the last dimension, or along ``dim``.
        dim: of the result, if it is not that of the operands.
    """
    given = list(sources)
    states = [t.of(source) for source in given]
    rows = [state for state in states if isinstance(state, Rows)]
    blames = joined(*states)
    if any(isinstance(state, Total) for state in states):
        blames = (*blames, MixingSource(node, FOR_EACH, True))
    orders = {row.order for row in rows if row.order is not None}
    if (len({row.dim for row in rows}) > 1 and dim is None) or len(orders) > 1:
        blames = (*blames, MixingSource(node, COMPARES, True))
    if any(row.number for row in rows):
        blames = (*blames, MixingSource(node, PLACES, False))
    if any(isinstance(state, BatchConstant) for state in states):
        t.fact_users.add(node)
    # rows without an order are the same for all examples, so the others' order holds
    ordered = next((row for row in rows if row.order is not None), rows[0])
    return Rows(
        ordered.dim if dim is None else dim,
        ordered.order,
        all(isinstance(s, BatchConstant) or getattr(s, "given", False) for s in states),
        tuple(dict.fromkeys(blames)),
        any(isinstance(state, BatchConstant) or getattr(state, "by_fact", False) for state in states),
    )


def pointwise(t: Tracking, node: Node) -> Found:
    """State after an operation element by element, with broadcasting; sizes are numbers here."""
    sources = flat((*node.args, *node.kwargs.values()))
    return (meet if any(isinstance(t.of(source), Rows) for source in sources) else level)(t, node, sources)


def level(t: Tracking, node: Node, sources: Iterable[Node]) -> Found:
    """State after an operation on values none of which has an element for each example."""
    states = [t.of(source) for source in sources]
    if any(isinstance(state, Total | Uniform) for state in states):
        return combined(t, node, states)
    given = all(isinstance(state, BatchConstant) or (isinstance(state, Fixed) and state.given) for state in states)
    if any(isinstance(state, BatchConstant) for state in states):
        return BatchConstant() if given else Uniform(t.blame(node, NO_SUM))
    return Fixed(given)


ADDITIONS = ("aten::add", "aten::sub", "aten::rsub", "aten::add_", "aten::sub_")
PRODUCTS = ("aten::mul", "aten::mul_")
MATRIX_PRODUCTS = ("aten::matmul", "aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::linear", "aten::einsum")
QUOTIENTS = ("aten::div", "aten::div_", "aten::true_divide")


def combined(t: Tracking, node: Node, states: list[State]) -> State:
    """State of sums over the batch after an operation that keeps sums, or does not."""
    name, totals = op_name(node), [state for state in states if isinstance(state, Total)]
    counts = frozenset[Count]().union(*(total.counts for total in totals))
    other = frozenset({Count("other", (node,))})
    if totals:
        t.undecided.update(joined(*(state for state in states if isinstance(state, Uniform))))
    if name in ADDITIONS:  # a sum of sums over micro-batches is the sum over them of sums
        return Total(counts, joined(*states)) if totals else Uniform(joined(*states))
    if name == "aten::neg":
        return states[0]
    if not totals:
        return Uniform(joined(*states))
    moved = [state for state in states if isinstance(state, Total | Uniform)]
    is_product = name in (*PRODUCTS, *MATRIX_PRODUCTS)
    if is_product and len(totals) == len(moved) == 1 and len(states) <= 2:  # a third one is added
        return Total(other if any(isinstance(s, BatchConstant) for s in states) else counts, joined(*states))
    if name in QUOTIENTS and not node.kwargs.get("rounding_mode"):
        divisor = t.of(node.args[1])
        if isinstance(divisor, Fixed):
            return Total(counts, joined(*states))
        if isinstance(divisor, BatchConstant):
            # a sum over a multiple of the number of examples (B, B * T) is a mean; over any other count, its own term
            by_size = multiple_of(getattr(node.args[1], "meta", {}).get("val"), t.batch) is not None
            return Total(frozenset({EXAMPLES}) if by_size and counts == {ONE} else other, joined(*states))
        if counts == {ONE} and isinstance(divisor, Total) and t.is_drawn(node.args[1]):  # type: ignore[arg-type]
            t.divisors.add(node.args[1])  # type: ignore[arg-type]
            return Total(frozenset({EXAMPLES}), (*joined(*states), MixingSource(node, DRAWN, False)))
        return Uniform((*joined(*states), MixingSource(node, DIVIDES, True)))
    if (
        name == "aten::where"
        and isinstance(states[0], BatchConstant)
        and not any(isinstance(s, Uniform) for s in states)
    ):
        return Total(other, joined(*states))
    what = PRODUCT if is_product and len(moved) > 1 else NO_SUM
    return Uniform((*joined(*states), MixingSource(node, what, True)))


def unknown(t: Tracking, node: Node) -> Found:
    """State after an operation without a rule, which is doubted as soon as examples go in."""
    return doubted(t, node, UNKNOWN, certain=False)


def doubted(t: Tracking, node: Node, what: str, *, certain: bool) -> Found:
    """State after an operation that mixes examples, or may."""
    states = [t.of(source) for source in operands(node)]
    moved = [state for state in states if not isinstance(state, Fixed)]
    value = node.meta.get("val")
    given = all(getattr(state, "given", True) for state in states)

    def one(made: object) -> State:
        dims = carriers(made)
        if not moved and not dims:
            return Fixed(given)
        # after an earlier doubt, only that one is named: what follows it decides nothing
        new = (MixingSource(node, what, certain),) if (moved and not joined(*states)) or certain else ()
        blames = tuple(dict.fromkeys((*joined(*states), *new))) or (MixingSource(node, what, certain),)
        return guessed(t, made, blames) if dims else Uniform(blames)

    return tuple(map(one, value)) if isinstance(value, list | tuple) else one(value)


def guessed(t: Tracking, value: object, blames: Blames) -> Rows:
    """State of a value whose examples seem to lie along its first dimension of no fixed size."""
    assert isinstance(value, Tensor)
    dim = carriers(value)[0]
    times = multiple_of(value.shape[dim], t.batch)
    return Rows(dim, RowOrder(1, times or 1), False, blames)


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its name in the operation's schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, each in enumerate(node.target._schema.arguments):
        if each.name == name:
            if position < len(node.args) and not each.kwarg_only:
                return node.args[position]
            return node.kwargs.get(name, each.default_value if each.has_default_value() else default)
    return default


def value_of(node: object) -> Tensor:
    """The captured tensor of a node."""
    value = node.meta["val"]  # type: ignore[attr-defined]
    assert isinstance(value, Tensor)
    return value


def at(rows: Rows, dim: int) -> Rows:
    """Return the same rows along another dimension."""
    return replace(rows, dim=dim)


def negative(dim: int, value: Tensor) -> int:
    """Return a dimension counted from the last."""
    return dim if dim < 0 else dim - value.dim()
