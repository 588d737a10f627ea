"""The relation of a graph's values to the examples of a batch, and the dimension along which examples lie.

Dimensions are counted from the last, -1: broadcasting and leading dimensions that come and go leave them alone.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node


class MixingSource(NamedTuple):
    """An operation that mixes examples, or may."""

    node: Node
    what: str
    """for people: what it does to the examples"""
    certain: bool
    """False: the operation is not known here; only running it tells"""


Blames = tuple[MixingSource, ...]


class RowOrder(NamedTuple):
    """The order of elements along a dimension of ``outer * count * inner``.

    Element i is that of example ``i // inner % count``. The examples are those of the batch, or the elements that a
    mask picks::

        outer 1, inner 1    0 1 2            a batch
        outer 1, inner 2    0 0 1 1 2 2      tokens of a batch, flattened
        outer 2, inner 1    0 1 2 0 1 2      two batches, concatenated
    """

    outer: int
    inner: int
    picked: Node | None = None
    """the node that picks: two pickings by one mask are in one order"""


IN_TURN = RowOrder(1, 1)


@dataclass(frozen=True)
class Fixed:
    """The same for every batch: parameters, constants and what follows from them."""

    given: bool
    """needs no parameters"""


@dataclass(frozen=True)
class Rows:
    """Each element belongs to one example."""

    dim: int
    """negative: along which the examples lie"""
    order: RowOrder | None
    """None: all examples have the same"""
    given: bool
    """follows from inputs and constants"""
    blames: Blames = ()
    """reason why an element may depend on other examples after all"""
    by_fact: bool = False
    """depends on a fact of the batch as well"""
    number: bool = False
    """is each example's number within its batch"""


class Count(NamedTuple):
    """The divisor of a sum over the batch."""

    kind: str
    """``"one"``: nothing does; ``"examples"``; ``"targets"``; ``"picked"``; ``"elements"`` of a value with open sizes;
    ``"other"``"""
    nodes: tuple[object, ...] = ()
    """that it is made of: equal ones count the same"""


ONE, EXAMPLES = Count("one"), Count("examples")


@dataclass(frozen=True)
class Total:
    """A sum over the examples, or linear in such sums, and in means whose divisors follow from inputs."""

    counts: frozenset[Count]
    blames: Blames = ()


@dataclass(frozen=True)
class BatchConstant:
    """A value of the whole batch, from inputs and constants alone: a size, a count, or computed from such."""


@dataclass(frozen=True)
class Uniform:
    """A value of the whole batch that is neither of the two above: no sum over its parts gives it."""

    blames: Blames


State = Fixed | Rows | Total | BatchConstant | Uniform


def joined(*states: State) -> Blames:
    """Blames of all states, each once."""
    return tuple(dict.fromkeys(blame for state in states for blame in getattr(state, "blames", ())))


def symbols_of(size: object) -> frozenset[Any]:
    """Symbols of one dimension."""
    return frozenset(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else frozenset()


def multiple_of(size: object, symbol: Any) -> int | None:
    """K where a dimension is k times a symbol; None if it is anything else, or there is no symbol."""
    if symbol is None or not isinstance(size, torch.SymInt):
        return None
    ratio = size.node.expr / symbol
    return int(ratio) if ratio.is_Integer else None


def carriers(value: object) -> list[int]:
    """Dimensions, negative, whose size is not fixed."""
    if not isinstance(value, Tensor):
        return []
    return [i - value.dim() for i, size in enumerate(value.shape) if symbols_of(size)]


def viewed(rows: Rows, before: Tensor, after: Tensor) -> Rows | None:
    """The same elements, in row-major order, under another shape; None if the examples do not lie along one of its
    dimensions.
    """
    symbols = symbols_of(before.shape[rows.dim])
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    order = rows.order or IN_TURN
    behind = _product(before.shape[before.dim() + rows.dim + 1 :])
    if behind is None:
        return None
    # elements of one example in a row, once the dimensions behind theirs are counted in
    inner = order.inner * behind
    for dim in range(-after.dim(), 0):
        times = multiple_of(after.shape[dim], symbol)
        rest = _product(after.shape[after.dim() + dim + 1 :])
        if not inner or times is None or not rest or inner % rest:  # without elements, nothing says where they lie
            continue
        # as many of them lie along this dimension, the others behind it
        within = inner // rest
        if times % within:
            return None
        changed = None if rows.order is None else RowOrder(times // within, within, order.picked)
        return Rows(dim, changed, rows.given, rows.blames, rows.by_fact, rows.number)
    return None


def _product(sizes: Any) -> int | None:
    total = 1
    for size in sizes:
        if symbols_of(size):
            return None
        total *= int(size)
    return total
