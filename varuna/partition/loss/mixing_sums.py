"""Operations that add up: products of matrices, sums and means, losses. Over examples, or for each of them."""

from dataclasses import replace
from string import ascii_uppercase

from torch.fx import Node

from varuna.partition.graph.operations import op_name
from varuna.partition.loss.batch_dimension import (
    EXAMPLES,
    ONE,
    BatchConstant,
    Count,
    MixingSource,
    Rows,
    State,
    Total,
    Uniform,
    joined,
)
from varuna.partition.loss.mixing import (
    CHOOSES,
    COMPARES,
    DIVIDES,
    MATRIX_PRODUCTS,
    Found,
    Rule,
    Tracking,
    argument,
    at,
    doubted,
    level,
    meet,
    operands,
    pointwise,
    unknown,
    value_of,
)
from varuna.partition.loss.mixing_shapes import along, named
from varuna.partition.opaque.ctc_loss import NAME as CTC

NONE, MEAN, SUM = 0, 1, 2
"""``reduction`` of a loss."""


def over_examples(t: Tracking, node: Node) -> bool:
    """Return whether the first operand has one value for each example, and no longer after the operation."""
    state = t.of(node.args[0])
    return isinstance(state, Rows) and state.dim in named(node, value_of(node.args[0]))


def adding(t: Tracking, node: Node) -> Found:
    """Track a sum or a mean."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows):
        return state
    if not over_examples(t, node):
        return along(named, COMPARES)(t, node)
    if state.given and not state.blames and not state.by_fact:
        return BatchConstant()
    return total(t, node, state, count_of(state) if "mean" in str(node.target) else ONE)


def count_of(state: Rows) -> Count:
    """Return the count of the rows: of examples, or of elements that a mask picks."""
    picked = None if state.order is None else state.order.picked
    return EXAMPLES if picked is None else Count("picked", (picked,))


def total(t: Tracking, node: Node, state: Rows, count: Count) -> State:
    """Return the state of a sum over the batch, divided by ``count``."""
    # how many a mask picks must be known before the step: it may not depend on activations
    if count.kind == "picked" and not getattr(t.of(count.nodes[0]), "given", False):
        return Uniform((*state.blames, MixingSource(node, DIVIDES, True)))
    t.operands.update({source: rows for source in operands(node) if isinstance(rows := t.of(source), Rows)})
    return Total(frozenset({Count("other", (node,)) if state.by_fact else count}), state.blames)


def choosing(t: Tracking, node: Node) -> Found:
    """Track reductions other than sums: largest, smallest, norms, variances, any."""
    state = t.of(node.args[0])
    if str(node.target).endswith(".other"):
        return pointwise(t, node)
    is_found = op_name(node) in FOUND and not value_of(node).dim()
    if is_found and isinstance(state, Rows) and state.given and not state.blames:
        return BatchConstant()
    return along(named, CHOOSES, certain=False)(t, node)


FOUND = ("aten::any", "aten::all")
"""Facts of the batch that follow from a count."""


def product(t: Tracking, node: Node) -> Found:
    """Track products of matrices or batches of them, and ``einsum``, by a letter for each dimension."""
    sources = operands(node)
    if not any(isinstance(t.of(source), Rows) for source in sources):
        return level(t, node, sources)
    terms, result = letters(node)
    if not terms:
        return unknown(t, node)
    states = [t.of(source) for source in sources]
    found = {term[state.dim] for term, state in zip(terms, states, strict=True) if isinstance(state, Rows)}
    if len(found) > 1:  # examples along two letters: each meets all others
        return doubted(t, node, COMPARES, certain=True)
    (letter,) = found
    if letter in result:
        return meet(t, node, sources, dim=result.index(letter) - len(result))
    # a bias would be added once by each micro-batch
    return total(t, node, meet(t, node, sources, dim=-1), ONE) if len(terms) < 3 else unknown(t, node)


def letters(node: Node) -> tuple[list[str], str]:
    """Write a product as ``einsum`` has it: a letter for each dimension of the operands, and of the result."""
    name, sources = op_name(node), operands(node)
    if name == "aten::einsum":
        given, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
        return (given.split(","), result) if arrow and "." not in given else ([], "")
    is_added = name in ("aten::addmm", "aten::baddbmm")
    ranks = [value_of(source).dim() for source in sources]
    left, right, *added = (*ranks[1:], ranks[0]) if is_added else ranks
    # leading dimensions broadcast from their last one, so that one is A in both
    leading = [ascii_uppercase[: max(rank - 2, 0)][::-1] for rank in (left, right)]
    one = f"{leading[0]}ik" if left > 1 else "k"
    two = (f"{leading[1]}jk" if name == "aten::linear" else f"{leading[1]}kj") if right > 1 else "k"
    result = max(leading, key=len) + "i" * (left > 1) + "j" * (right > 1)
    bias = [result[len(result) - rank :] for rank in added]
    return ([*bias, one, two] if is_added else [one, two, *bias]), result


def recurrent(t: Tracking, node: Node) -> Found:
    """Track LSTM, GRU and plain recurrent layers over padded sequences; the state's examples lie along dimension 1."""
    state = t.of(node.args[0])
    if not isinstance(state, Rows) or ".data" in str(node.target) or state.dim not in (-2, -3):
        return unknown(t, node)
    found = meet(t, node, operands(node), dim=state.dim)
    # states are [layers, examples, hidden], whatever ``batch_first`` says of the outputs
    return (found, *(at(found, -2) for _ in node.meta["val"][1:]))


def losses(t: Tracking, node: Node) -> Found:
    """Track a loss of each example or element, or their sum or mean."""
    sources = operands(node)
    rows = [(source, state) for source in sources if isinstance(state := t.of(source), Rows)]
    reduction, leading = argument(node, "reduction", MEAN), op_name(node) in LEADING
    if not rows:
        return level(t, node, sources)
    # LEADING: examples along dimension 0 of each operand, whose shapes differ behind it ([N, C, ...] and [N, ...])
    met = meet(t, node, sources, dim=-1 if leading else None)
    if leading and any(state.dim != -value_of(source).dim() for source, state in rows):
        met = replace(met, blames=(*met.blames, MixingSource(node, COMPARES, False)))
    if reduction == NONE:
        return at(met, -node.meta["val"].dim()) if leading else met
    return total(t, node, met, ONE if reduction == SUM else _divisor(t, node, met))


def _divisor(t: Tracking, node: Node, met: Rows) -> Count:
    """Return the count that a mean loss divides by."""
    if op_name(node) not in TARGETS or value_of(node.args[1]).is_floating_point():
        return count_of(met)
    target, weight = node.args[1], argument(node, "weight")
    known = getattr(t.of(target), "given", False) and (weight is None or getattr(t.of(weight), "given", False))
    return Count("targets", (target, argument(node, "ignore_index", -100), weight)) if known else count_of(met)


def alignments(t: Tracking, node: Node) -> Found:
    """Track a loss for each example, along dimension 1 of the log-probabilities; targets may be all in one row."""
    sources = operands(node)
    states = [t.of(source) for source in sources]
    if not isinstance(states[0], Rows) or states[0].dim != -2:
        return unknown(t, node)
    targets, value = states[1], value_of(sources[1])
    blames = joined(*states)
    if isinstance(targets, Rows) and value.dim() == 1 and (targets.order is None or targets.order.picked is None):
        # each example's are found by the lengths of those before
        blames = (*blames, MixingSource(node, COMPARES, False))
    by_fact = any(isinstance(state, BatchConstant) or getattr(state, "by_fact", False) for state in states)
    return Rows(-1, states[0].order, False, blames, by_fact)


TARGETS = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d")
LEADING = (*TARGETS, "aten::multi_margin_loss", "aten::multilabel_margin_loss", "aten::cosine_embedding_loss",
           "aten::triplet_margin_loss")  # fmt: skip
_POINTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
              "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss", "hinge_embedding_loss",
              "poisson_nll_loss", "margin_ranking_loss")  # fmt: skip
LOSSES = (*LEADING, *(f"aten::{name}" for name in _POINTWISE))


SUMS: dict[str, Rule] = {
    **dict.fromkeys(("sum", "mean", "nansum"), adding),
    **dict.fromkeys(("max", "min", "amax", "amin", "argmax", "argmin", "logsumexp", "var", "std", "norm", "any", "all",
                     "linalg_vector_norm", "prod", "median", "mode", "var_mean", "std_mean", "count_nonzero",
                     "aminmax", "frobenius_norm"), choosing),
    **dict.fromkeys(("topk", "kthvalue"), along(named, CHOOSES)),
    **dict.fromkeys((name.removeprefix("aten::") for name in (*MATRIX_PRODUCTS, "addmm", "baddbmm")), product),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **{name.removeprefix("aten::"): losses for name in LOSSES},
    CTC: alignments,
}  # fmt: skip
"""By the operation's name, without ``aten::``."""
