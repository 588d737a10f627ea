"""Dimensions of the examples after an operation along some dimensions, or one that moves elements (views, slices)."""

from collections.abc import Callable, Collection
from dataclasses import replace
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
    joined,
    multiple_of,
    viewed,
)
from varuna.partition.loss.mixing import (
    COMPARES,
    PLACES,
    UNKNOWN,
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

Dimensions = Callable[[Node, Tensor], Collection[int]]
"""Dimensions, negative, of an operand."""


def along(dims: Dimensions, what: str, *, certain: bool = True) -> Rule:
    """A rule for operations that take elements along some dimensions together: of each example, or of all."""

    def rule(t: Tracking, node: Node) -> Found:
        rows = [(source, state) for source in operands(node) if isinstance(state := t.of(source), Rows)]
        if not rows:
            return level(t, node, operands(node))
        if any(state.dim in dims(node, value_of(source)) for source, state in rows):
            return doubted(t, node, what, certain=certain)
        source, state = rows[0]
        made = node.meta["val"]
        # dimensions count from the last: each one that goes behind the examples' moves theirs by one
        gone = value_of(source).dim() - (made[0] if isinstance(made, list | tuple) else made).dim()
        moves = min(gone, sum(dim > state.dim for dim in dims(node, value_of(source))))
        return meet(t, node, operands(node), dim=state.dim + moves if moves else None)

    return rule


def named(node: Node, value: Tensor) -> list[int]:
    """Dimensions that an operation names; all, if it names none."""
    dims = argument(node, "dims", argument(node, "dim", argument(node, "dimension")))
    many = dims if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    return [negative(int(dim), value) for dim in many] or list(range(-value.dim(), 0))


def none(node: Node, value: Tensor) -> list[int]:
    """Return no dimension: the operation may add a new last one."""
    return []


def last(number: int) -> Dimensions:
    """Return a function that gives the last ``number`` dimensions."""
    return lambda node, value: range(-number, 0)


def but_first(node: Node, value: Tensor) -> range:
    """Return all dimensions but the first."""
    return range(1 - value.dim(), 0)


def normalised(node: Node, value: Tensor) -> range:
    """Return the last dimensions, over which a norm is taken."""
    return range(-len(node.args[1]), 0)  # type: ignore[arg-type]


def padded(node: Node, value: Tensor) -> list[int]:
    """Return the dimensions whose ends get more elements."""
    sizes: Any = node.args[1]
    return [-1 - place // 2 for place, size in enumerate(sizes) if not isinstance(size, int) or size]


def same(t: Tracking, node: Node) -> Found:
    """Track copies and casts."""
    return t.of(node.args[0])


def view(t: Tracking, node: Node) -> Found:
    """Track the same elements, in the same row-major order, under another shape."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows):
        return state
    return viewed(state, value_of(node.args[0]), value_of(node)) or unknown(t, node)


def permute(t: Tracking, node: Node) -> Found:
    """Track dimensions in another order."""
    state, rank, target = t.of(node.args[0]), value_of(node.args[0]).dim(), node.target
    if not isinstance(state, Rows):
        return state
    # a tensor whose sizes are the numbers of its dimensions shows where each of them goes
    order = target(torch.empty(tuple(range(rank)), device="meta"), *node.args[1:]).shape  # type: ignore[operator]
    return at(state, order.index(rank + state.dim) - rank)


def expand(t: Tracking, node: Node) -> Found:
    """Track repeats along dimensions of size 1, or new ones in front."""
    state, dims = t.of(node.args[0]), carriers(value_of(node))
    if isinstance(state, Rows):  # a second open dimension: each example meets each
        return doubted(t, node, COMPARES, certain=True) if len(dims) > 1 else state
    if not dims or isinstance(state, Total | Uniform):
        return unknown(t, node) if dims else state
    by_fact = isinstance(state, BatchConstant)
    spread = sized(t, node, given=by_fact or getattr(state, "given", False))
    return replace(spread, by_fact=by_fact) if isinstance(spread, Rows) and len(dims) == 1 else spread


def sized(t: Tracking, node: Node, *, given: bool) -> Found:
    """State of what is the same for all examples, however many there are."""
    dims = carriers(value_of(node))
    if len(dims) > 1:
        return unknown(t, node)
    return Rows(dims[0], None, given) if dims else Fixed(given)


def uniform(t: Tracking, node: Node) -> Found:
    """Track what is made of sizes and numbers: the same for all examples."""
    return sized(t, node, given=True)


def numbers(t: Tracking, node: Node) -> Found:
    """Track 0, 1, 2...: the examples' numbers, where there are as many."""
    dims = carriers(value_of(node))
    if not dims:
        return Fixed(given=True)
    copies = multiple_of(value_of(node).shape[dims[0]], t.batch) or 1  # as many as a batch that was put together
    return Rows(dims[0], RowOrder(copies, 1), True, number=True)


def random(t: Tracking, node: Node) -> Found:
    """Track draws, which differ from batch to batch in plain PyTorch, too."""
    if any(isinstance(t.of(source), Rows) for source in operands(node)):
        return meet(t, node, operands(node))
    return sized(t, node, given=False)


def written(t: Tracking, node: Node) -> Found:
    """Track what is copied or filled in, with the shape of what it goes into."""
    states = [t.of(source) for source in operands(node)]
    if any(isinstance(state, Rows) for state in states):
        return meet(t, node, operands(node))
    return states[-1] if len(states) > 1 else Fixed(given=True)


def permutation(t: Tracking, node: Node) -> Found:
    """Track a random order, of the examples if there are as many."""
    dims = carriers(value_of(node))
    blame = (MixingSource(node, PLACES, True),)
    return Rows(dims[0], IN_TURN, False, blame) if dims else Fixed(given=False)


def looked_up(t: Tracking, node: Node) -> Found:
    """Track the place of each element in a list that is the same for all, or whether it is there."""
    states = [t.of(source) for source in operands(node)]
    rows = sum(isinstance(state, Rows) for state in states)
    alike = all(isinstance(state, Fixed | Rows) for state in states)
    return unknown(t, node) if rows > 1 or (rows and not alike) else pointwise(t, node)


def part(t: Tracking, node: Node) -> Found:
    """Track a slice, or one index, of one dimension."""
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
    if left and left == whole:
        return state
    # the first whole batches of several that were put together: x[: 2 * B] of 3 * B
    if left and whole and from_start and left % order.inner == 0 and (argument(node, "step", 1) or 1) == 1:
        return replace(state, order=order._replace(outer=left // order.inner), number=False)
    return doubted(t, node, PLACES, certain=True)


def parts(t: Tracking, node: Node) -> Found:
    """Track split, chunk or unbind."""
    state, value, made = t.of(node.args[0]), value_of(node.args[0]), node.meta["val"]
    dim = negative(int(argument(node, "dim", 0)), value)
    if not isinstance(state, Rows):
        return state
    if dim != state.dim:
        return at(state, state.dim + 1) if "unbind" in str(node.target) and dim > state.dim else state
    order = state.order or IN_TURN
    # each part must be whole batches of those that were put together
    times = [multiple_of(each.shape[each.dim() + dim], t.batch) for each in made]
    if any(time is None or time % order.inner for time in times):
        return doubted(t, node, PLACES, certain=True)
    orders = (order._replace(outer=int(time or 0) // order.inner) for time in times)
    return tuple(replace(state, order=each, number=False) for each in orders)


def joining(t: Tracking, node: Node) -> Found:
    """Track concatenation or stacking."""
    sources = flat([node.args[0]])
    states = [t.of(source) for source in sources]
    value = value_of(node)
    dim = negative(int(argument(node, "dim", 0)), value)
    rows = [state for state in states if isinstance(state, Rows)]
    if not rows:
        return _joined_level(t, node, states)
    met = meet(t, node, sources)
    if "stack" in str(node.target):
        return at(met, carriers(value)[0]) if len(carriers(value)) == 1 else unknown(t, node)
    if dim != met.dim:
        return met
    known = {state.order.inner for state in rows if state.order is not None}
    outer = [multiple_of(value_of(source).shape[dim], t.batch) for source in sources]
    if len(rows) < len(states) or len(known) > 1 or any(each is None for each in outer):
        return unknown(t, node)
    inner = next(iter(known), 1)
    # batches one after the other: their numbers add up, if examples lie alike within all
    order = RowOrder(sum(int(each or 0) for each in outer) // inner, inner)
    blames = tuple(blame for blame in met.blames if blame.node is not node)  # unlike parts may follow each other
    return replace(met, dim=dim, order=order, blames=blames)


def _joined_level(t: Tracking, node: Node, states: list[State]) -> Found:
    totals = [state for state in states if isinstance(state, Total)]
    others = [state for state in states if isinstance(state, Uniform)]
    if totals:
        t.undecided.update(joined(*others))
        return Total(frozenset().union(*(total.counts for total in totals)), joined(*states))
    if others:
        return unknown(t, node)
    if any(isinstance(state, BatchConstant) for state in states):
        return BatchConstant()
    return sized(t, node, given=all(getattr(state, "given", False) for state in states))


def repeat(t: Tracking, node: Node) -> Found:
    """Track copies: whole ones one after the other, or of each element."""
    state, before, after = t.of(node.args[0]), value_of(node.args[0]), value_of(node)
    if not isinstance(state, Rows):
        return expand(t, node)
    small = multiple_of(before.shape[before.dim() + state.dim], t.batch)
    large = multiple_of(after.shape[after.dim() + state.dim], t.batch)
    if len(carriers(after)) > 1 or not small or not large:
        return unknown(t, node)
    order, times = state.order or IN_TURN, large // small
    each = "interleave" in str(node.target)
    # 0 0 1 1 of repeat_interleave, 0 1 0 1 of repeat
    order = RowOrder(order.outer, order.inner * times) if each else RowOrder(order.outer * times, order.inner)
    return replace(state, order=order, number=False)


def broadcast(t: Tracking, node: Node) -> Found:
    """Track several tensors that are broadcast to one shape."""
    found = []
    for source, made in zip(flat([node.args[0]]), node.meta["val"], strict=True):
        state, dims = t.of(source), carriers(made)
        grown = isinstance(state, Fixed) and len(dims) == 1
        found.append(Rows(dims[0], None, state.given) if grown else state)  # type: ignore[union-attr]
    return tuple(found)


EACH_CHANNEL = ("max_pool{}d", "max_pool{}d_with_indices", "avg_pool{}d", "adaptive_avg_pool{}d",
                "adaptive_max_pool{}d", "max_unpool{}d", "reflection_pad{}d", "replication_pad{}d",
                "upsample_nearest{}d", "upsample_linear{}d", "upsample_bilinear{}d", "upsample_bicubic{}d",
                "upsample_trilinear{}d")  # fmt: skip
"""Operations on the last dimensions alone, by the number of these."""
SHAPES: dict[str, Rule] = {
    **dict.fromkeys(("clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh_copy", "lift", "type_as",
                     "resolve_conj", "real", "imag", "float", "pin_memory", "data"), same),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as",
                     "reshape_as", "ravel"), view),
    **dict.fromkeys(("permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "mT", "numpy_T"), permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
                     "ones_like", "full_like", "empty_like", "scalar_tensor"), uniform),
    "arange": numbers,
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "bernoulli", "dropout",
                     "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "normal", "uniform", "exponential",
                     "rrelu", "poisson", "cauchy", "geometric", "log_normal"), random),
    **dict.fromkeys(("copy", "fill"), written),
    **dict.fromkeys(("hardswish", "prelu", "rsub", "subtract", "multiply", "divide", "negative", "absolute", "fix",
                     "less", "less_equal", "greater", "greater_equal", "not_equal", "arccos", "arcsin", "arctan",
                     "arctan2", "arccosh", "arcsinh", "arctanh", "complex", "polar", "conj", "special_ndtr",
                     "log_sigmoid", "__and__", "__or__", "__xor__", "floor_divide", "true_divide", "masked_fill",
                     "clamp_min", "clamp_max"), pointwise),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "glu", "diff", "cosine_similarity"),
                    along(named, COMPARES)),
    **dict.fromkeys(("flip", "roll"), along(named, PLACES)),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"),
                    along(named, PLACES, certain=False)),
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2",
                     "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_fftshift",
                     "fft_ifftshift"), along(named, COMPARES, certain=False)),
    **dict.fromkeys(("unfold", "unfold_copy"), along(named, UNKNOWN, certain=False)),
    **dict.fromkeys(("tril", "triu"), along(last(2), UNKNOWN, certain=False)),
    **dict.fromkeys(("scaled_dot_product_attention", "cdist", "_cdist_forward"), along(last(2), COMPARES)),
    "pairwise_distance": along(last(1), COMPARES),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), along(normalised, COMPARES)),
    **dict.fromkeys(("one_hot", "view_as_real"), along(none, UNKNOWN)),
    "view_as_complex": along(last(1), UNKNOWN),
    **dict.fromkeys(("batch_norm", "instance_norm"), along(none, COMPARES)),  # for which ``micro_batch=`` answers
    **dict.fromkeys(("pad", "constant_pad_nd"), along(padded, PLACES)),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
                     "conv_transpose3d", "pixel_shuffle", "pixel_unshuffle", "bilinear", "lstm_cell", "gru_cell",
                     "grid_sampler", "im2col", "col2im", "channel_shuffle", "grid_sampler_2d", "grid_sampler_3d",
                     "affine_grid_generator", "multi_head_attention", "group_norm"),
                    along(but_first, UNKNOWN, certain=False)),
    **{name.format(dims): along(last(dims), UNKNOWN, certain=False) for dims in (1, 2, 3) for name in EACH_CHANNEL},
    **dict.fromkeys(("bucketize", "searchsorted", "isin"), looked_up),
    "randperm": permutation,
    **dict.fromkeys(("slice", "select", "narrow"), part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split",
                     "unsafe_split_with_sizes", "unsafe_chunk"), parts),
    **dict.fromkeys(("cat", "concat", "stack"), joining),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), repeat),
    "broadcast_tensors": broadcast,
}  # fmt: skip
"""By the operation's name, without ``aten::``."""
