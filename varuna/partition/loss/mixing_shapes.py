"""Dimensions of the examples after an operation that moves elements: views, concatenations, indexing."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from varuna.partition.graph.operations import flat
from varuna.partition.loss.batch_dimension import (
    IN_TURN,
    BatchConstant,
    Fixed,
    MixingSource,
    RowOrder,
    Rows,
    State,
    Total,
    Uniform,
    carriers,
    multiple_of,
)
from varuna.partition.loss.batch_dimension import viewed as _viewed
from varuna.partition.loss.mixing import (
    COMPARES,
    PLACES,
    UNKNOWN,
    Found,
    Tracking,
    argument,
    doubted,
    meet,
    negative,
    operands,
    pointwise,
)


def value_of(node: object) -> Tensor:
    """The captured tensor of a node."""
    value = node.meta["val"]  # type: ignore[attr-defined]
    assert isinstance(value, Tensor)
    return value


def same(t: Tracking, node: Node) -> Found:
    """Copies and casts."""
    return t.of(node.args[0])


def at(rows: Rows, dim: int) -> Rows:
    """The same along another dimension."""
    return Rows(dim, rows.order, rows.given, rows.blames, rows.by_fact, rows.number)


def view(t: Tracking, node: Node) -> Found:
    """The same elements in the same row-major order."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows):
        return state
    found = _viewed(state, value_of(node.args[0]), value_of(node))
    return found or doubted(t, node, UNKNOWN, certain=False)


def permute(t: Tracking, node: Node) -> Found:
    """Dimensions in another order."""
    state, value = t.of(node.args[0]), value_of(node.args[0])
    rest: Any = node.args[1:]
    if not isinstance(state, Rows):
        return state
    name = str(node.target)
    order = list(range(value.dim()))
    if "permute" in name:
        order = [dim % value.dim() for dim in rest[0]]
    elif "movedim" in name:
        order = [int(size) for size in torch.empty(tuple(range(value.dim()))).movedim(*rest).shape]
    else:
        a, b = rest[:2] if len(rest) > 1 else (-2, -1)  # t(), mT
        a, b = a % value.dim(), b % value.dim()
        order[a], order[b] = order[b], order[a]
    return at(state, order.index(value.dim() + state.dim) - value.dim())


def expand(t: Tracking, node: Node) -> Found:
    """Repeats along dimensions of size 1, or new ones in front."""
    state = t.of(node.args[0])
    dims = carriers(value_of(node))
    if isinstance(state, Rows):
        return doubted(t, node, COMPARES, certain=True) if len(dims) > 1 else state
    if not dims:
        return state
    if len(dims) == 1 and isinstance(state, Fixed):
        return Rows(dims[0], None, state.given)
    if len(dims) == 1 and isinstance(state, BatchConstant):
        return Rows(dims[0], None, True, (), True)
    return doubted(t, node, UNKNOWN, certain=False)


def uniform(t: Tracking, node: Node) -> Found:
    """Made of sizes and numbers: the same for all examples."""
    dims = carriers(value_of(node))
    if len(dims) > 1:
        return doubted(t, node, UNKNOWN, certain=False)
    return Rows(dims[0], None, True) if dims else Fixed(given=True)


def numbers(t: Tracking, node: Node) -> Found:
    """0, 1, 2...: the examples' numbers, where there are as many."""
    dims = carriers(value_of(node))
    if not dims:
        return Fixed(given=True)
    copies = multiple_of(value_of(node).shape[dims[0]], t.batch) or 1  # as many as a batch that was put together
    return Rows(dims[0], RowOrder(copies, 1), True, (), False, number=True)


def random(t: Tracking, node: Node) -> Found:
    """Drawn: nobody expects the same draws of another batch."""
    states = [t.of(source) for source in operands(node)]
    if any(isinstance(state, Rows) for state in states):
        return meet(t, node, operands(node))
    dims = carriers(value_of(node))
    return Rows(dims[0], None, False) if dims else Fixed(given=False)


def written(t: Tracking, node: Node) -> Found:
    """Track what is copied or filled in, with the shape of what it goes into."""
    states = [t.of(source) for source in operands(node)]
    if any(isinstance(state, Rows) for state in states):
        return meet(t, node, operands(node))
    return states[-1] if len(states) > 1 else Fixed(given=True)


def permutation(t: Tracking, node: Node) -> Found:
    """A random order, of the examples if there are as many."""
    dims = carriers(value_of(node))
    blame = (MixingSource(node, PLACES, True),)
    return Rows(dims[0], IN_TURN, False, blame) if dims else Fixed(given=False)


def along(t: Tracking, node: Node) -> Found:
    """Elements change along one dimension or several (softmax, flip, sort): of one example each, or of all."""
    state, value = t.of(node.args[0]), value_of(node.args[0])
    if not isinstance(state, Rows):
        return doubted(t, node, UNKNOWN, certain=False) if not isinstance(state, Fixed) else state
    name = str(node.target)
    default: Any = 0 if any(each in name for each in ("stack", "index_select")) else -1
    dims = argument(node, "dims", argument(node, "dim", default))
    many = list(dims) if isinstance(dims, list | tuple) else [default if dims is None else dims]
    if state.dim in [negative(dim, value) for dim in many]:
        moves = any(each in name for each in ("flip", "roll", "sort", "cum"))
        return doubted(t, node, PLACES if moves else COMPARES, certain="sort" not in name and "cum" not in name)
    result = meet(t, node, operands(node))
    return tuple(result for _ in node.meta["val"]) if isinstance(node.meta["val"], list | tuple) else result


def windows(t: Tracking, node: Node) -> Found:
    """``unfold``: parts of one dimension, each along a new last one."""
    state, value = t.of(node.args[0]), value_of(node.args[0])
    if not isinstance(state, Rows):
        return state if isinstance(state, Fixed) else unsure(t, node)
    return unsure(t, node) if negative(argument(node, "dimension"), value) == state.dim else at(state, state.dim - 1)


def spectrum(t: Tracking, node: Node) -> Found:
    """Fourier transforms of some dimensions."""
    state, dims = t.of(node.args[0]), argument(node, "dim")
    if isinstance(state, Rows) and dims is not None:
        many = dims if isinstance(dims, list | tuple) else [dims]
        if state.dim not in [negative(dim, value_of(node.args[0])) for dim in many]:
            return meet(t, node, operands(node))
    return state if isinstance(state, Fixed) else doubted(t, node, COMPARES, certain=False)


def triangle(t: Tracking, node: Node) -> Found:
    """The upper or lower triangle of the matrices of the last two dimensions."""
    state = t.of(node.args[0])
    return unsure(t, node) if not isinstance(state, Rows | Fixed) or getattr(state, "dim", -3) > -3 else state


def looked_up(t: Tracking, node: Node) -> Found:
    """Each element in a list that is the same for all: its place, or whether it is there."""
    states = [t.of(source) for source in operands(node)]
    if all(isinstance(state, Fixed) for state in states):
        return pointwise(t, node)
    one = sum(isinstance(state, Rows) for state in states) == 1
    return (
        meet(t, node, operands(node)) if one and all(isinstance(s, Rows | Fixed) for s in states) else unsure(t, node)
    )


def part(t: Tracking, node: Node) -> Found:
    """A slice, or one index, of one dimension."""
    state, value = t.of(node.args[0]), value_of(node.args[0])
    if not isinstance(state, Rows):
        return state
    dim = negative(int(argument(node, "dim", 0)), value)
    is_select = "select" in str(node.target)
    if dim != state.dim:
        return at(state, state.dim + 1) if is_select and dim > state.dim else state
    if is_select:
        return Fixed(given=True) if t.is_step(node.args[0]) else doubted(t, node, PLACES, certain=True)
    whole, left = (multiple_of(each.shape[each.dim() + dim], t.batch) for each in (value, value_of(node)))
    start, order = argument(node, "start", 0) or 0, state.order or IN_TURN
    begin = start if isinstance(start, int) else start.meta["val"]
    from_start = begin == 0 if isinstance(begin, int) else (multiple_of(begin, t.batch) or 1) % order.inner == 0
    if left and whole and left == whole:
        return state
    if left and whole and from_start and left % order.inner == 0 and (argument(node, "step", 1) or 1) == 1:
        return Rows(dim, RowOrder(left // order.inner, order.inner, order.picked), state.given, state.blames)
    return doubted(t, node, PLACES, certain=True)


def parts(t: Tracking, node: Node) -> Found:
    """Split, chunk or unbind."""
    state, value, made = t.of(node.args[0]), value_of(node.args[0]), node.meta["val"]
    dim = negative(int(argument(node, "dim", 0)), value)
    if isinstance(state, Rows) and dim == state.dim:
        order = state.order or IN_TURN
        times = [multiple_of(each.shape[each.dim() + dim], t.batch) for each in made]
        if any(time is None or time % order.inner for time in times):
            return doubted(t, node, PLACES, certain=True)
        orders = [RowOrder(int(time or 0) // order.inner, order.inner, order.picked) for time in times]
        return tuple(Rows(dim, each, state.given, state.blames, state.by_fact) for each in orders)
    if isinstance(state, Rows) and "unbind" in str(node.target) and dim > state.dim:
        state = at(state, state.dim + 1)
    return tuple(state for _ in made)


def joining(t: Tracking, node: Node) -> Found:
    """Concatenate or stack."""
    sources = flat([node.args[0]])
    states = [t.of(source) for source in sources]
    value = value_of(node)
    is_stack = "stack" in str(node.target)
    dim = negative(int(argument(node, "dim", 0)), value)
    rows = [state for state in states if isinstance(state, Rows)]
    if not rows:
        return _joined_level(t, node, states)
    met = meet(t, node, sources)
    if is_stack:
        return at(met, carriers(value)[0]) if len(carriers(value)) == 1 else unsure(t, node)
    if dim != met.dim:
        return met
    orders = [state.order if isinstance(state, Rows) else None for state in states]
    known = {order.inner for order in orders if order is not None}
    outer = [multiple_of(value_of(source).shape[dim], t.batch) for source in sources]
    if len(rows) < len(states) or len(known) > 1 or any(each is None for each in outer):
        return doubted(t, node, UNKNOWN, certain=False)
    inner = next(iter(known), 1)
    order = RowOrder(sum(int(each or 0) for each in outer) // inner, inner)
    blames = tuple(blame for blame in met.blames if blame.node is not node)  # unlike parts may follow each other
    return Rows(dim, order, met.given, blames, met.by_fact)


def _joined_level(t: Tracking, node: Node, states: list[State]) -> Found:
    if any(isinstance(state, Uniform) for state in states) and not any(isinstance(state, Total) for state in states):
        return doubted(t, node, UNKNOWN, certain=False)
    totals = [state for state in states if isinstance(state, Total)]
    if totals:
        blames = tuple(dict.fromkeys(blame for state in states for blame in getattr(state, "blames", ())))
        return Total(frozenset().union(*(total.counts for total in totals)), blames)
    if any(isinstance(state, BatchConstant) for state in states):
        return BatchConstant()
    dims = carriers(value_of(node))
    given = all(getattr(state, "given", False) for state in states)
    return Rows(dims[0], None, given) if dims else Fixed(given)


def repeat(t: Tracking, node: Node) -> Found:
    """Copies, whole ones one after the other or of each element."""
    state, before, after = t.of(node.args[0]), value_of(node.args[0]), value_of(node)
    if not isinstance(state, Rows):
        return expand(t, node)
    small = multiple_of(before.shape[before.dim() + state.dim], t.batch)
    large = multiple_of(after.shape[after.dim() + state.dim], t.batch)
    if len(carriers(after)) > 1 or not small or not large:
        return doubted(t, node, UNKNOWN, certain=False)
    order, times = state.order or IN_TURN, large // small
    each = "interleave" in str(node.target)
    order = RowOrder(order.outer, order.inner * times) if each else RowOrder(order.outer * times, order.inner)
    return Rows(state.dim, order, state.given, state.blames, state.by_fact)


def one_hot(t: Tracking, node: Node) -> Found:
    """A new last dimension."""
    state = t.of(node.args[0])
    return at(state, state.dim - 1) if isinstance(state, Rows) else state


def complexes(t: Tracking, node: Node) -> Found:
    """The last dimension comes or goes."""
    state = t.of(node.args[0])
    step = -1 if "real" in str(node.target) else 1
    return at(state, state.dim + step) if isinstance(state, Rows) else state


def unsure(t: Tracking, node: Node) -> Found:
    """No rule decides."""
    return doubted(t, node, UNKNOWN, certain=False)


def pad(t: Tracking, node: Node) -> Found:
    """Elements more at the ends of the last dimensions."""
    state = t.of(node.args[0])
    sizes: Any = node.args[1]
    padded = len(sizes) // 2
    if isinstance(state, Rows) and -state.dim <= padded:
        sides = sizes[2 * (-state.dim - 1) : 2 * -state.dim]
        return state if not any(sides) else doubted(t, node, PLACES, certain=True)
    return state if isinstance(state, Rows | Fixed) else unsure(t, node)


def broadcast(t: Tracking, node: Node) -> Found:
    """Several tensors to one shape."""
    found = []
    for source, made in zip(flat([node.args[0]]), node.meta["val"], strict=True):
        state, dims = t.of(source), carriers(made)
        grown = isinstance(state, Fixed) and len(dims) == 1
        found.append(Rows(dims[0], None, state.given) if grown else state)  # type: ignore[union-attr]
    return tuple(found)


SHAPES = {
    **dict.fromkeys(("clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh_copy", "lift", "type_as",
                     "resolve_conj", "real", "imag", "float", "pin_memory", "data"), same),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as",
                     "reshape_as", "ravel"), view),
    **dict.fromkeys(("permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "mT", "numpy_T"), permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
                     "ones_like", "full_like", "empty_like", "scalar_tensor", "full_like"), uniform),
    "arange": numbers,
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "bernoulli", "dropout",
                     "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "normal", "uniform", "exponential",
                     "bernoulli.p", "rrelu", "poisson", "cauchy", "geometric", "log_normal"), random),
    **dict.fromkeys(("copy", "fill"), written),
    **dict.fromkeys(("hardswish", "prelu", "rsub", "subtract", "multiply", "divide", "negative", "absolute", "fix",
                     "less", "less_equal", "greater", "greater_equal", "not_equal", "arccos", "arcsin", "arctan",
                     "arctan2", "arccosh", "arcsinh", "arctanh", "complex", "polar", "conj", "special_ndtr",
                     "log_sigmoid"), pointwise),
    **dict.fromkeys(("__and__", "__or__", "__xor__", "floor_divide", "true_divide", "masked_fill", "clamp_min",
                     "clamp_max"), pointwise),
    "unfold": windows,
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2",
                     "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_fftshift",
                     "fft_ifftshift"), spectrum),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("bucketize", "searchsorted", "isin"), looked_up),
    "randperm": permutation,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort",
                     "argsort", "flip", "roll", "glu", "renorm", "cummax", "cummin", "diff"), along),
    **dict.fromkeys(("slice", "select", "narrow"), part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split",
                     "unsafe_split_with_sizes", "unsafe_chunk"), parts),
    **dict.fromkeys(("cat", "concat", "stack"), joining),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), repeat),
    "one_hot": one_hot,
    **dict.fromkeys(("view_as_real", "view_as_complex"), complexes),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    "broadcast_tensors": broadcast,
}  # fmt: skip
"""By the operation's name, without ``aten::``."""
