"""Dimensions of the examples after indexing: by numbers, masks, and the places where a mask is true."""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from varuna.partition.graph.operations import flat, op_name
from varuna.partition.graph.shared_memory import written_arguments
from varuna.partition.loss.batch_dimension import ONE, BatchConstant, Fixed, RowOrder, Rows, carriers, joined
from varuna.partition.loss.mixing import (
    COMPARES,
    PLACES,
    Found,
    Rule,
    Tracking,
    argument,
    at,
    doubted,
    level,
    meet,
    negative,
    operands,
    pointwise,
    unknown,
    value_of,
)
from varuna.partition.loss.mixing_sums import total


def index(t: Tracking, node: Node) -> Found:
    """Track indexing by tensors."""
    source: Any = node.args[0]
    places: Any = node.args[1]
    state, value = t.of(source), value_of(source)
    indices = [(place, each) for place, each in enumerate(places) if isinstance(each, Node)]
    found = {place: t.of(each) for place, each in indices}
    dims = carriers(value_of(node))
    moving = [each for each in found.values() if isinstance(each, Rows)]
    nodes = [source, *(each for _, each in indices)]
    if any(not isinstance(each, Rows | Fixed) for each in (state, *found.values())):
        return unknown(t, node)
    # own: the source's dimension of the examples; found: by dimension, the state of the numbers that index it
    own = value.dim() + state.dim if isinstance(state, Rows) else None
    if not moving:
        if own is None:
            return Fixed(getattr(state, "given", False))
        if own in found:
            # x[[0, 2]]: the same places of every batch
            return doubted(t, node, PLACES, certain=True)
        return at(state, dims[0]) if len(dims) == 1 and isinstance(state, Rows) else unknown(t, node)
    if len(indices) == 1 and value_of(indices[0][1]).dtype is torch.bool:
        return _picked(t, node, indices[0])
    if len(dims) != 1:
        # two open dimensions: each example meets each
        return doubted(t, node, COMPARES, certain=len(dims) > 1)
    if own is None:
        # table[ids]: each example looks up its own
        return meet(t, node, nodes, dim=dims[0])
    picks = {each.order.picked for each in moving if each.order is not None and each.order.picked is not None}
    # x[mask.nonzero(as_tuple=True)]: what one mask picks, in its order
    if own in found and len(picks) == 1:
        return _along_picks(t, node, next(iter(picks)), moving, dims[0])
    number = found.get(own)
    # x[arange(B), ids]: each example takes from its own row
    if isinstance(number, Rows) and number.number and state.order in (number.order, None):  # type: ignore[union-attr]
        others = [each for place, each in indices if place != own]
        return meet(t, node, [source, *others], dim=dims[0])
    return doubted(t, node, PLACES if own in found else COMPARES, certain=False)


def _picked(t: Tracking, node: Node, chosen: tuple[int, Node]) -> Found:
    """Track the elements where a mask is true."""
    place, mask = chosen
    source = node.args[0]
    state, which, value = t.of(source), t.of(mask), value_of(source)
    dims = carriers(value_of(node))
    if not isinstance(which, Rows) or not isinstance(state, Rows | Fixed) or len(dims) != 1:
        return unknown(t, node)
    # the dimension of the source that meets the mask's examples: a mask covers dimensions from ``place`` on
    left = value_of(mask).dim() + which.dim + place
    if isinstance(state, Rows) and (value.dim() + state.dim != left or _unlike(state.order, which.order)):
        return doubted(t, node, COMPARES, certain=True)
    met = meet(t, node, flat([source, mask]), dim=dims[0])
    return replace(met, order=RowOrder(1, 1, mask), blames=joined(state, which))


def _unlike(one: RowOrder | None, two: RowOrder | None) -> bool:
    return one is not None and two is not None and one != two


def _along_picks(t: Tracking, node: Node, mask: Node, moving: list[Rows], dim: int) -> Found:
    state, which = t.of(node.args[0]), t.of(mask)
    if not isinstance(state, Rows) or not isinstance(which, Rows) or _unlike(state.order, which.order):
        return unknown(t, node)
    given = state.given and all(each.given for each in moving)
    return Rows(dim, RowOrder(1, 1, mask), given, joined(state, *moving), state.by_fact)


def put(t: Tracking, node: Node) -> Found:
    """Track ``x[mask] = y``, where ``y`` is the same for all or what the mask picks.

    Labels that are written in place are left alone: a count would be read from them, and values that are written do
    not count as given.
    """
    source, places, given = node.args[:3]
    if written_arguments(node) and not value_of(source).is_floating_point():
        return unknown(t, node)
    indices = [(place, each) for place, each in enumerate(places) if isinstance(each, Node)]  # type: ignore[arg-type]
    if len(indices) != 1 or value_of(indices[0][1]).dtype is not torch.bool or argument(node, "accumulate", False):
        return unknown(t, node)
    ((place, mask),) = indices
    state, which, new = t.of(source), t.of(mask), t.of(given)
    picked = isinstance(new, Rows) and new.order is not None and new.order.picked is mask
    if not isinstance(which, Rows) or not isinstance(state, Rows | Fixed) or not (picked or isinstance(new, Fixed)):
        return unknown(t, node)
    dim = value_of(mask).dim() + which.dim + place - value_of(source).dim()
    if isinstance(state, Rows) and (state.dim != dim or _unlike(state.order, which.order)):
        return doubted(t, node, COMPARES, certain=False)
    return meet(t, node, flat([source, mask] if picked else [source, mask, given]), dim=dim)


def masked(t: Tracking, node: Node) -> Found:
    """Track ``masked_select`` as indexing by a mask; both may be broadcast."""
    source, mask = operands(node)
    alike = value_of(source).dim() == value_of(mask).dim()
    return _picked(t, node, (0, mask)) if alike else unknown(t, node)


def nonzero(t: Tracking, node: Node) -> Found:
    """Track the places where a mask is true."""
    source = node.args[0]
    state = t.of(source)
    if not isinstance(state, Rows) or not isinstance(source, Node) or "nonzero.default" in str(node.target):
        return unknown(t, node)
    return replace(state, dim=-1, order=RowOrder(1, 1, source), number=False)


def gather(t: Tracking, node: Node) -> Found:
    """Track values taken, or put, along one dimension by an index of the same shape in the others."""
    sources = operands(node)
    states = [t.of(source) for source in sources]
    dim = negative(int(argument(node, "dim", 0)), value_of(sources[0]))
    own = states[0]
    if isinstance(own, Fixed) and any(isinstance(state, Rows) and state.dim == dim for state in states[1:]):
        return scattered(t, node)
    if not any(isinstance(state, Rows) for state in states):
        return level(t, node, sources)
    if isinstance(own, Rows) and own.dim == dim:
        return doubted(t, node, PLACES, certain=False)
    return meet(t, node, sources)


def scattered(t: Tracking, node: Node) -> Found:
    """Track elements added up by a number of each: a sum over the examples, where they go into zeros."""
    name, sources = op_name(node).removeprefix("aten::").removesuffix("_"), operands(node)
    into = name == "bincount" or op_name(sources[0]).removeprefix("aten::") in ZEROS
    rows = [state for source in sources if isinstance(state := t.of(source), Rows)]
    if not rows or not into or name not in ADDING or carriers(node.meta["val"]):
        return unknown(t, node)
    met = meet(t, node, [source for source in sources if isinstance(t.of(source), Rows)])
    return total(t, node, met, ONE) if not met.given or met.blames or met.by_fact else BatchConstant()


ADDING = ("scatter_add", "index_add", "bincount")
ZEROS = ("zeros", "new_zeros", "zeros_like")


def taken(t: Tracking, node: Node) -> Found:
    """Track rows of a table, or rows or columns of a matrix, by a list of their numbers."""
    table, place = operands(node)
    dim = negative(int(argument(node, "dim")), value_of(table)) if "select" in str(node.target) else None
    source, where = t.of(table), t.of(place)
    if isinstance(source, Rows):
        return source if isinstance(where, Fixed) and dim not in (None, source.dim) else unknown(t, node)
    if isinstance(where, Rows):
        # embedding puts a new last dimension behind those of the numbers
        return meet(t, node, [table, place], dim=where.dim - 1 if dim is None else dim)
    return level(t, node, [table, place])


def where(t: Tracking, node: Node) -> Found:
    """Track a choice, or the places where a mask is true."""
    return nonzero(t, node) if str(node.target).endswith(".default") else pointwise(t, node)


INDEXING: dict[str, Rule] = {
    "where": where,
    **dict.fromkeys(("index", "_unsafe_index"), index),
    "index_put": put,
    "masked_select": masked,
    **dict.fromkeys(("nonzero_numpy", "nonzero"), nonzero),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "take_along_dim", "scatter_reduce"), gather),
    **dict.fromkeys(("index_add", "bincount"), scattered),
    **dict.fromkeys(("embedding", "index_select"), taken),
}
"""By the operation's name, without ``aten::``."""
