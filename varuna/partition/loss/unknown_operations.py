"""The part of a graph that is run to find out whether an unknown operation mixes examples."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from varuna.partition.cut.split import SectionGraph, section_graph
from varuna.partition.graph.flow import Flow
from varuna.partition.loss.batch_dimension import IN_TURN
from varuna.partition.loss.mixing import needed_by
from varuna.partition.loss.terms import Terms, doubted_values

aten = torch.ops.aten


@dataclass(frozen=True)
class TrialValues:
    """One result of a trial: a tensor, some elements of which belong to each example."""

    dim: int
    """negative"""
    inner: int
    """elements of an example that follow each other"""
    picked: bool
    """a mask picks the elements, as many as it is true for"""


@dataclass(frozen=True)
class Trial:
    """A graph from inputs, parameters, buffers and constants to values that may have been mixed."""

    graph: SectionGraph
    values: tuple[TrialValues, ...]
    """its first results"""
    divisors: int
    """number of further results, which must be equal for each example"""


def trial_of(flow: Flow, terms: Terms, number: int) -> Trial | None:
    """A trial that decides the doubts in ``terms``; None if there are none that a run could decide."""
    rows, divisors = doubted_values(terms)
    made = [*(node for node, _ in rows), *divisors]
    if not made:
        return None
    needed = needed_by(flow.capture.graph, made)
    own = [node for node in flow.ops if node in needed]
    orders = [(each.dim, each.order or IN_TURN) for _, each in rows]
    values = tuple(TrialValues(dim, order.inner, order.picked is not None) for dim, order in orders)
    graph = section_graph(flow, number, own, made)
    _fix_statistics(graph.module)
    return Trial(graph, values, len(divisors))


def _fix_statistics(module: GraphModule) -> None:
    """Fix the statistics of batch normalisation, for which ``micro_batch=`` exists: they must not hide other mixing."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if node.args[5] is True:
            like, kind = (node.args[0], [node.meta["val"].shape[1]]), {"dtype": torch.float32}
            with graph.inserting_before(node):
                for place, make in ((3, aten.new_zeros.default), (4, aten.new_ones.default)):
                    node.update_arg(place, graph.call_function(make, like, kind))  # type: ignore[arg-type]
            node.update_arg(5, False)
    module.recompile()
