"""Terms of a loss, read from the graph: sums over the batch, and what divides each of them."""

from dataclasses import dataclass
from textwrap import shorten

from torch.fx import Node

from varuna.partition.graph.captured import Capture
from varuna.partition.graph.operations import op_name
from varuna.partition.graph.shared_memory import bodies_of
from varuna.partition.loss.batch_dimension import EXAMPLES, Blames, Count, Rows, Total, Uniform
from varuna.partition.loss.mixing import Rule, Tracking
from varuna.partition.loss.mixing_indexing import INDEXING
from varuna.partition.loss.mixing_shapes import SHAPES
from varuna.partition.loss.mixing_sums import SUMS
from varuna.partition.loss.open_terms import OpenTracking
from varuna.partition.watching.own_code import OWN

_SHOWN = 80
"""Most characters of a line of code in a message."""
RULES: dict[str, Rule] = {**SHAPES, **INDEXING, **SUMS}


@dataclass(frozen=True)
class Terms:
    """The terms of one graph's loss."""

    tracking: Tracking
    counts: frozenset[Count]
    blames: Blames
    """operations that mix the examples of a batch on their way into the loss, or may"""

    @property
    def single(self) -> Count | None:
        """The divisor of all terms, if it is one number that every micro-batch can count for itself."""
        if len(self.counts) != 1:
            return None if self.counts else EXAMPLES
        (count,) = self.counts
        return count if count.kind in ("examples", "targets", "picked", "elements") else None


def terms_of(capture: Capture) -> Terms:
    """Follow the examples from the inputs to the loss."""
    output = next(node for node in capture.graph.nodes if node.op == "output")
    loss: Node = output.args[0][0]
    tracking = Tracking(capture, [loss], RULES) if capture.sizes is None else OpenTracking(capture, loss)
    state = tracking.of(loss)
    counts = state.counts if isinstance(state, Total) else frozenset[Count]()
    blames: Blames = getattr(state, "blames", ())
    undecided = set(blames) if isinstance(state, Uniform) else tracking.undecided
    if any(blame.certain for blame in blames):
        undecided = set()  # these are told already
    found = tuple(dict.fromkeys(b._replace(certain=True) if b in undecided else b for b in blames))
    if capture.sizes is not None:
        found = ()  # examples lie along no dimension: samples decide (``open_terms``)
    return Terms(tracking, counts, found)


def doubted_values(terms: Terms) -> tuple[list[tuple[Node, Rows]], list[Node]]:
    """Values from which a run can tell whether examples are mixed: those with one element for each, and divisors that
    are drawn, which must be the same for each example.
    """
    doubts = {blame for blame in terms.blames if not blame.certain}
    rows = [(node, rows) for node, rows in terms.tracking.operands.items() if doubts.intersection(rows.blames)]
    return rows, sorted(terms.tracking.divisors, key=lambda node: node.name) if doubts else []


@dataclass(frozen=True)
class Mixing:
    """One operation that mixes examples, or may, as messages name it."""

    what: str
    where: str | None
    """``file:line (code)``"""
    certain: bool
    operation: str = ""
    """such as ``aten::mul``; the name of a function of Python's, if it is one"""


def mixing_of(terms: Terms) -> tuple[Mixing, ...]:
    """Operations that mix examples in a loss, each place once."""
    found = (mixing_at(blame.node, blame.what, certain=blame.certain) for blame in terms.blames)
    return tuple(dict.fromkeys(found))


def mixing_at(node: Node, what: str, *, certain: bool = True) -> Mixing:
    """The ``Mixing`` of a node of the graph."""
    name = op_name(node) or getattr(node.target, "__name__", str(node.target))
    inside = (place_of(each) for body in bodies_of(node) for each in body.graph.nodes)
    return Mixing(what, place_of(node) or next(filter(None, inside), None), certain, name)


def place_of(node: Node) -> str | None:
    """``file:line`` of the user's code that the node comes from, with that line."""
    lines = str(node.meta.get("stack_trace") or "").splitlines()
    found = None
    for line, code in zip(lines, [*lines[1:], ""], strict=False):
        parts = line.strip().split('"')
        if line.strip().startswith("File ") and len(parts) > 2 and not parts[1].startswith(OWN):
            number = parts[2].removeprefix(", line ").split(",")[0]
            found = f"{parts[1]}:{number} ({shorten(code.strip(), _SHOWN, placeholder=' ...')})"
    return found
