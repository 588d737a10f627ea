"""The terms of a loss where the sizes of a batch are open: sums over the whole micro-batch, and what divides each.

Here examples lie along no dimension, so the graph cannot show whether it keeps them apart (a packed row attends within
its sequences, a graph passes messages along its edges). Samples show that: before step 0 a batch is compared with its
parts (``checks.selfcheck``, ``checks.loss_weight``).
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.flow import is_random
from varuna.partition.graph.operations import flat, op_name
from varuna.partition.loss.batch_dimension import (
    IN_TURN,
    ONE,
    BatchConstant,
    Count,
    Fixed,
    Rows,
    State,
    Total,
    Uniform,
    carriers,
)
from varuna.partition.loss.mixing import PRODUCTS, QUOTIENTS, Tracking, argument, combined
from varuna.partition.loss.mixing_sums import LOSSES, MEAN, NONE, SUM, TARGETS

_SUMS = ("aten::sum", "aten::nansum")
_KEEPING = ("view", "reshape", "to", "_to_copy", "stack", "cat", "squeeze", "unsqueeze", "sum", "clone", "expand",
            "alias", "contiguous", "select")  # fmt: skip
"""Operations after which sums are sums."""


class OpenTracking(Tracking):
    """States of all values that the loss follows from: what has an open size, what is a sum, what divides it."""

    def __init__(self, capture: Capture, result: Node) -> None:
        super().__init__(capture, [result], {})

    def _follow(self, node: Node) -> State:
        value = node.meta.get("val")
        dims = carriers(value)
        if node.op == "placeholder":
            if node.name in self._capture.inputs:
                return Rows(dims[0], IN_TURN, given=True) if dims else BatchConstant()
            return Fixed(given=node.name not in self._capture.parameters and not self._memory.is_written(node))
        if node.op == "get_attr":
            return Fixed(given=True)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return BatchConstant() if value.node.expr.free_symbols <= self._capture.open_symbols.keys() else Uniform(())
        sources = flat((*node.args, *node.kwargs.values()))
        states = [self.of(source) for source in sources]
        given = all(isinstance(s, BatchConstant) or getattr(s, "given", False) for s in states)
        given = given and not is_random(node) and not self._memory.is_written(node)
        rows = any(isinstance(state, Rows) for state in states)
        if dims or (isinstance(value, list | tuple) and any(map(carriers, value))):
            return self._rows(node, dims, states, given=given)
        if node.target is operator.getitem:
            return states[0]
        if rows:
            return BatchConstant() if given else self._total(node)
        if any(isinstance(state, Total | Uniform) for state in states):
            totals = [state for state in states if isinstance(state, Total)]
            if op_name(node).removeprefix("aten::") in _KEEPING and len(totals) == len(states):
                return Total(frozenset[Count]().union(*(total.counts for total in totals)))
            return combined(self, node, states)
        if any(isinstance(state, BatchConstant) for state in states):
            return BatchConstant() if given else Uniform(())
        return Fixed(given=given)

    def _rows(self, node: Node, dims: list[int], states: list[State], *, given: bool) -> State:
        if any(isinstance(state, Total | Uniform) for state in states):
            return Uniform(()) if not dims else Rows(dims[0], IN_TURN, given=False)
        divides = op_name(node) in (*PRODUCTS, *QUOTIENTS) and not given
        by_fact = any(getattr(state, "by_fact", False) for state in states)
        if divides and any(isinstance(state, BatchConstant) for state in states):
            self.fact_users.add(node)  # a loss for each place, divided by how many there are
            by_fact = True
        return Rows(dims[0] if dims else -1, IN_TURN, given, (), by_fact)

    def _total(self, node: Node) -> State:
        """Return what an operation makes of values with open sizes, if it has none itself."""
        name = op_name(node)
        source = node.args[0]
        if isinstance(state := self.of(source), Rows) and state.by_fact:
            return Total(frozenset({Count("other", (node,))})) if name in _SUMS else Uniform(())
        if name in _SUMS:
            return Total(frozenset({ONE}))
        if name == "aten::mean":
            return Total(frozenset({Count("elements", (source, _dims(node)))}))
        if name not in LOSSES or argument(node, "reduction", MEAN) == NONE:
            return Uniform(())
        if argument(node, "reduction", MEAN) == SUM:
            return Total(frozenset({ONE}))
        target, weight = node.args[1], argument(node, "weight")
        if name not in TARGETS or not isinstance(target, Node) or target.meta["val"].is_floating_point():
            counted = target if name in TARGETS else source
            return Total(frozenset({Count("elements", (counted, None if name not in TARGETS else (0,)))}))
        if isinstance(state := self.of(target), Rows | BatchConstant) and getattr(state, "given", True):
            return Total(frozenset({Count("targets", (target, argument(node, "ignore_index", -100), weight))}))
        return Uniform(())


def _dims(node: Node) -> tuple[int, ...] | None:
    dims: Any = argument(node, "dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return None
    return tuple(dims) if isinstance(dims, list | tuple) else (dims,)


def sizes_along(value: Tensor, dims: tuple[int, ...] | None) -> list[Any]:
    """Sizes whose product is the number of elements along dimensions; None: along all."""
    return [value.shape[dim] for dim in (range(value.dim()) if dims is None else dims)]
