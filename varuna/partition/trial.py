"""The part of a graph that is run to find out whether an operation that nobody knows mixes examples."""

from dataclasses import dataclass

from varuna.partition.flow import Flow
from varuna.partition.mixing import needed_by
from varuna.partition.rows import Order
from varuna.partition.split import SectionGraph, section_graph
from varuna.partition.terms import Terms, doubted_values


@dataclass(frozen=True)
class Values:
    """One result of a trial: a tensor, some elements of which belong to each example."""

    dim: int
    """negative"""
    order: Order

    @property
    def picked(self) -> bool:
        """By a mask: as many as it is true for."""
        return self.order.picked is not None


@dataclass(frozen=True)
class Trial:
    """A graph from inputs, parameters, buffers and constants to values that may have been mixed."""

    graph: SectionGraph
    values: tuple[Values, ...]
    """its first results"""
    divisors: int
    """so many further ones, which must be as large for each example"""


def trial_of(flow: Flow, terms: Terms, number: int) -> Trial | None:
    """What decides about the doubts in ``terms``; None if there are none that a run could decide."""
    rows, divisors = doubted_values(terms)
    made = [*(node for node, _ in rows), *divisors]
    if not made:
        return None
    needed = needed_by(flow.capture.graph, made)
    own = [node for node in flow.ops if node in needed]
    values = tuple(Values(each.dim, each.order or Order(1, 1)) for _, each in rows)
    return Trial(section_graph(flow, number, own, made), values, len(divisors))
