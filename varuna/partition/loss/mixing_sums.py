"""Operations that add up: products of matrices, sums and means, losses. Over examples, or for each of them."""

from typing import Any

from torch.fx import Node

from varuna.partition.graph.operations import op_name
from varuna.partition.loss.batch_dimension import (
    EXAMPLES,
    ONE,
    BatchConstant,
    Count,
    Fixed,
    MixingSource,
    Rows,
    State,
    Total,
    Uniform,
    carriers,
    joined,
)
from varuna.partition.loss.mixing import (
    CHOOSES,
    COMPARES,
    DIVIDES,
    FOR_EACH,
    NO_SUM,
    PRODUCT,
    Found,
    Tracking,
    argument,
    doubted,
    meet,
    negative,
    operands,
    pointwise,
)
from varuna.partition.loss.mixing_shapes import at, unsure, value_of
from varuna.partition.opaque.ctc_loss import NAME as CTC

NONE, MEAN, SUM = 0, 1, 2
"""``reduction`` of a loss."""


def reduced(node: Node) -> list[int] | None:
    """Dimensions, negative, that an operation takes together; None: all."""
    value = value_of(node.args[0])
    dims = argument(node, "dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return None
    many = dims if isinstance(dims, list | tuple) else [dims]
    return [negative(int(dim), value) for dim in many]


def over_examples(t: Tracking, node: Node) -> bool:
    """Whether the first operand has one value for each example, and no longer after the operation."""
    state, dims = t.of(node.args[0]), reduced(node)
    return isinstance(state, Rows) and (dims is None or state.dim in dims)


def _kept(node: Node, state: Rows) -> Rows:
    dims = reduced(node) or []
    gone = 0 if argument(node, "keepdim", False) else sum(dim > state.dim for dim in dims)
    return at(state, state.dim + gone)


def adding(t: Tracking, node: Node) -> Found:
    """A sum or a mean."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows):
        return state
    if not over_examples(t, node):
        return _kept(node, state)
    if state.given and not state.blames and not state.by_fact:
        return BatchConstant()
    count = count_of(state) if "mean" in str(node.target) else ONE
    t.operands[node.args[0]] = state  # type: ignore[index]
    return total(t, node, state, count)


def count_of(state: Rows) -> Count:
    """Return the count of the rows: of examples, or of elements that a mask picks."""
    picked = None if state.order is None else state.order.picked
    return EXAMPLES if picked is None else Count("picked", (picked,))


def total(t: Tracking, node: Node, state: Rows, count: Count) -> State:
    """A sum over the batch, divided by ``count``."""
    if count.kind == "picked" and not getattr(t.of(count.nodes[0]), "given", False):
        return Uniform((*state.blames, MixingSource(node, DIVIDES, True)))
    return Total(frozenset({Count("other", (node,)) if state.by_fact else count}), state.blames)


def choosing(t: Tracking, node: Node) -> Found:
    """Reductions other than sums: largest, smallest, norms, variances, any."""
    state, value = t.of(node.args[0]), node.meta["val"]
    if str(node.target).endswith(".other"):
        return pointwise(t, node)
    if not isinstance(state, Rows):
        return doubted(t, node, NO_SUM, certain=True) if isinstance(state, Total | Uniform | BatchConstant) else state
    if over_examples(t, node):
        if op_name(node) in FOUND and state.given and not state.blames and reduced(node) is None:
            return BatchConstant()
        found: State = doubted(t, node, CHOOSES, certain=False)  # type: ignore[assignment]
    else:
        found = _kept(node, state) if "topk" not in str(node.target) else state
    return tuple(found for _ in value) if isinstance(value, list | tuple) else found


FOUND = ("aten::any", "aten::all")
"""Facts of the batch that follow from a count."""


def top(t: Tracking, node: Node) -> Found:
    """The largest along one dimension."""
    state, value = t.of(node.args[0]), node.meta["val"]
    dim = negative(int(argument(node, "dim", -1)), value_of(node.args[0]))
    if isinstance(state, Rows) and dim == state.dim:
        return tuple(Uniform((*state.blames, MixingSource(node, CHOOSES, True))) for _ in value)
    return tuple(state for _ in value)


def linear(t: Tracking, node: Node) -> Found:
    """A product with a matrix of parameters."""
    state, weight = t.of(node.args[0]), t.of(node.args[1])
    if isinstance(weight, Fixed) and isinstance(state, Rows) and state.dim < -1:
        return meet(t, node, operands(node), dim=state.dim)
    return matmul(t, node) if not isinstance(weight, Fixed) or isinstance(state, Rows) else _untouched(t, node)


def _untouched(t: Tracking, node: Node) -> Found:
    """No examples go in along a dimension."""
    states = [t.of(source) for source in operands(node)]
    if all(isinstance(state, Fixed) for state in states):
        return Fixed(all(getattr(state, "given", False) for state in states))
    totals = [state for state in states if isinstance(state, Total)]
    if len(totals) == 1 and all(isinstance(state, Total | Fixed) for state in states) and len(states) == 2:
        return totals[0]
    return Uniform((*joined(*states), MixingSource(node, PRODUCT if len(totals) > 1 else NO_SUM, True)))


def matmul(t: Tracking, node: Node) -> Found:
    """Products of matrices, or of batches of them; the first two operands (with ``baddbmm`` the last two)."""
    name = op_name(node).removeprefix("aten::")
    sources = [node.args[1], node.args[2]] if name in ("addmm", "baddbmm", "addmv") else [node.args[0], node.args[1]]
    one, two = (t.of(source) for source in sources)
    if not isinstance(one, Rows) and not isinstance(two, Rows):
        return _untouched(t, node)
    for other in (one, two):
        if isinstance(other, Total | Uniform):
            return doubted(t, node, FOR_EACH, certain=True)
    a, b = (value_of(source).dim() for source in sources)
    made = node.meta["val"].dim()
    left = one.dim if isinstance(one, Rows) else None
    right = two.dim if isinstance(two, Rows) else None
    if b == 1 and right is not None:
        right = -2  # a column
    if a == 1 and left is not None:
        left = -1
    if left == -1 or right == -2:
        if left == -1 and right == -2 and all(isinstance(each, Rows) for each in (one, two)):
            state = Rows(-1, None, False, joined(one, two), _by_fact(one) or _by_fact(two))
            return total(t, node, state, ONE) if one.order == two.order else doubted(t, node, COMPARES, certain=True)  # type: ignore[union-attr]
        fixed = isinstance(two if left == -1 else one, Fixed)
        if fixed and not carriers(value_of(sources[1 if left == -1 else 0])):
            return unsure(t, node)
        return total(t, node, one if left == -1 else two, ONE) if fixed else doubted(t, node, COMPARES, certain=True)  # type: ignore[arg-type]
    if left is not None and right is not None:
        if left != right or left == -2 or right == -1:
            return doubted(t, node, COMPARES, certain=True)
        return meet(t, node, sources)  # type: ignore[arg-type]
    dim = left if left is not None else right
    shift = (1 if b == 1 and left is not None else 0) if made else 0  # the last dimension of the result is gone
    shift += 1 if a == 1 and right is not None and right < -2 else 0
    return meet(t, node, sources, dim=(dim or 0) + shift)  # type: ignore[arg-type]


def _by_fact(state: State) -> bool:
    return isinstance(state, Rows) and state.by_fact


def einsum(t: Tracking, node: Node) -> Found:
    """``einsum``, by its letters."""
    equation, sources = str(node.args[0]).replace(" ", ""), operands(node)
    states = [t.of(source) for source in sources]
    rows = [state for state in states if isinstance(state, Rows)]
    if "." in equation or "->" not in equation or not rows or any(isinstance(s, Total | Uniform) for s in states):
        return unsure(t, node) if rows else _untouched(t, node)
    terms, result = equation.split("->")
    letters = {term[state.dim] for term, state in zip(terms.split(","), states, strict=True) if isinstance(state, Rows)}
    if len(letters) > 1:
        return doubted(t, node, COMPARES, certain=True)
    (letter,) = letters
    dim = result.index(letter) - len(result) if letter in result else None
    met = meet(t, node, sources, dim=-1 if dim is None else dim)
    return met if dim is not None else total(t, node, met, ONE)


def outermost(t: Tracking, node: Node) -> Found:
    """The first dimension of what goes in and of what comes out counts examples."""
    sources = operands(node)
    rows = [(source, state) for source in sources if isinstance(state := t.of(source), Rows)]
    if not rows:
        return pointwise(t, node) if all(isinstance(t.of(s), Fixed) for s in sources) else _untouched(t, node)
    if any(state.dim != -value_of(source).dim() for source, state in rows):
        return unsure(t, node)
    made = node.meta["val"]
    first = made[0] if isinstance(made, list | tuple) else made
    blames = meet(t, node, sources, dim=-first.dim()).blames
    found = meet(t, node, [source for source, _ in rows], dim=-first.dim())
    state = Rows(found.dim, found.order, False, tuple(dict.fromkeys((*found.blames, *blames))), found.by_fact)
    return tuple(at(state, -each.dim()) for each in made) if isinstance(made, list | tuple) else state


def unchanged(t: Tracking, node: Node) -> Found:
    """Normalisations, each over dimensions of one example; batch normalisation, which ``micro_batch=`` answers for."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows):
        return state if isinstance(state, Fixed) else unsure(t, node)
    shape = node.args[1]
    if op_name(node) in ("aten::layer_norm", "aten::rms_norm", "aten::native_layer_norm"):
        if -state.dim <= len(shape):  # type: ignore[arg-type]
            return doubted(t, node, COMPARES, certain=True)
    elif op_name(node) == "aten::group_norm" and state.dim != -value_of(node.args[0]).dim():
        return unsure(t, node)
    made = node.meta["val"]
    found = Rows(state.dim, state.order, False, state.blames, state.by_fact)
    return tuple(found for _ in made) if isinstance(made, list | tuple) else found


def attention(t: Tracking, node: Node) -> Found:
    """Queries, keys and values of one example each."""
    sources = operands(node)
    rows = [state for source in sources if isinstance(state := t.of(source), Rows)]
    if not rows:
        return _untouched(t, node)
    if any(state.dim > -3 for state in rows):
        return doubted(t, node, COMPARES, certain=True)
    return meet(t, node, sources)


def recurrent(t: Tracking, node: Node) -> Found:
    """LSTM, GRU and plain ones over padded sequences; the state's examples lie along dimension 1."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows) or ".data" in str(node.target) or state.dim not in (-2, -3):
        return unsure(t, node)
    made = node.meta["val"]
    found = Rows(state.dim, state.order, False, state.blames, state.by_fact)
    return (found, *(at(found, -2) for _ in made[1:]))


def losses(t: Tracking, node: Node) -> Found:
    """A loss of each example or element, or their sum or mean."""
    sources = operands(node)
    states = [t.of(source) for source in sources]
    rows = [state for state in states if isinstance(state, Rows)]
    reduction = argument(node, "reduction", MEAN)
    if not rows:
        return _untouched(t, node)
    leading = op_name(node) in LEADING
    if leading and any(
        isinstance(state, Rows) and state.dim != -value_of(source).dim()
        for source, state in zip(sources, states, strict=True)
    ):
        met = Rows(-1, rows[0].order, False, (*joined(*states), MixingSource(node, COMPARES, False)))
    else:
        met = meet(t, node, sources, dim=-1 if leading else None)
    if reduction == NONE:
        return at(met, -node.meta["val"].dim()) if leading else met
    for source, state in zip(sources, states, strict=True):
        if isinstance(state, Rows):
            t.operands[source] = state
    return total(t, node, met, ONE if reduction == SUM else _divisor(t, node, met))


def _divisor(t: Tracking, node: Node, met: Rows) -> Count:
    """Return the count that a mean loss divides by."""
    if op_name(node) not in TARGETS or value_of(node.args[1]).is_floating_point():
        return count_of(met)
    target, weight = node.args[1], argument(node, "weight")
    known = getattr(t.of(target), "given", False) and (weight is None or getattr(t.of(weight), "given", False))
    return Count("targets", (target, argument(node, "ignore_index", -100), weight)) if known else count_of(met)


def alignments(t: Tracking, node: Node) -> Found:
    """A loss for each example, along dimension 1 of the log-probabilities; targets may be all in one row."""
    sources = operands(node)
    states = [t.of(source) for source in sources]
    if not isinstance(states[0], Rows) or states[0].dim != -2:
        return unsure(t, node)
    targets, value = states[1], value_of(sources[1])
    blames = joined(*states)
    if isinstance(targets, Rows) and value.dim() == 1 and (targets.order is None or targets.order.picked is None):
        blames = (
            *blames,
            MixingSource(node, COMPARES, False),
        )  # each example's are found by the lengths of those before
    given = (state for state in states if isinstance(state, Rows))
    by_fact = any(state.by_fact for state in given) or any(isinstance(state, BatchConstant) for state in states)
    return Rows(-1, states[0].order, False, blames, by_fact)


TARGETS = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d")
LEADING = (*TARGETS, "aten::multi_margin_loss", "aten::multilabel_margin_loss", "aten::cosine_embedding_loss",
           "aten::triplet_margin_loss")  # fmt: skip
_POINTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
              "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss", "hinge_embedding_loss",
              "poisson_nll_loss", "margin_ranking_loss")  # fmt: skip
LOSSES = (*LEADING, *(f"aten::{name}" for name in _POINTWISE))


def similar(t: Tracking, node: Node) -> Found:
    """Cosine similarity of two vectors, along one dimension."""
    sources = operands(node)
    if not any(isinstance(t.of(source), Rows) for source in sources):
        return _untouched(t, node)
    met = meet(t, node, sources)
    value, made = value_of(sources[0]), node.meta["val"]
    dim = negative(int(argument(node, "dim", -1)), value)
    if met.dim == dim:
        return doubted(t, node, COMPARES, certain=True)
    return at(met, met.dim + (made.dim() < value.dim() and dim > met.dim))


def distances(t: Tracking, node: Node) -> Found:
    """Distances of all vectors of one set to all of another."""
    rows = [state for source in operands(node) if isinstance(state := t.of(source), Rows)]
    if not rows or any(state.dim > -3 for state in rows):
        return doubted(t, node, COMPARES, certain=bool(rows))
    return meet(t, node, operands(node))


SUMS: dict[str, Any] = {
    **dict.fromkeys(("sum", "mean", "nansum"), adding),
    **dict.fromkeys(("max", "min", "amax", "amin", "argmax", "argmin", "logsumexp", "var", "std", "norm", "any", "all",
                     "linalg_vector_norm", "prod", "median", "mode", "var_mean", "std_mean", "count_nonzero",
                     "aminmax", "frobenius_norm"), choosing),
    **dict.fromkeys(("topk", "kthvalue"), top),
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "dot"), matmul),
    "einsum": einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
                     "conv_transpose3d", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
                     "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
                     "adaptive_avg_pool3d", "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
                     "upsample_bicubic2d", "upsample_linear1d", "upsample_nearest1d", "pixel_shuffle",
                     "pixel_unshuffle", "bilinear", "lstm_cell", "gru_cell", "grid_sampler", "im2col", "col2im",
                     "unfold_copy", "channel_shuffle", "adaptive_max_pool1d", "adaptive_max_pool3d",
                     "max_pool1d_with_indices", "max_pool3d_with_indices", "max_unpool2d", "max_unpool3d",
                     "upsample_nearest3d", "upsample_trilinear3d", "grid_sampler_2d", "grid_sampler_3d",
                     "affine_grid_generator", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
                     "replication_pad1d", "replication_pad2d", "replication_pad3d", "multi_head_attention"), outermost),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "native_layer_norm"),
                    unchanged),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **{name.removeprefix("aten::"): losses for name in LOSSES},
    CTC: alignments,
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), similar),
    **dict.fromkeys(("cdist", "_cdist_forward"), distances),
}  # fmt: skip
"""By the operation's name, without ``aten::``."""
