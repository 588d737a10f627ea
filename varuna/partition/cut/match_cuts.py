"""The same cuts in another graph of the same model: found by what the operations are and in which modules."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from torch.fx import Node

from varuna.core.errors import ModelError
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.graph.operations import Operation, operation


class UnlikeGraphsError(ModelError):
    """Two graphs of one model do not have the same places."""


def same_places(operations: Sequence[Operation], cuts: Sequence[int]) -> Callable[[Flow, Sequence[Cost]], list[int]]:
    """A chooser that cuts a graph where another one is cut.

    Args:
        operations: of the other graph, in order.
        cuts: positions after which it is cut, ascending.

    Raises (when it is called):
        UnlikeGraphsError: a place is not there, or nothing can be cut there.
    """

    def choose(flow: Flow, _: Sequence[Cost]) -> list[int]:
        where = _aligned(operations, [operation(node) for node in flow.ops])
        live_bytes = flow.live_bytes()
        found = [where.get(cut, -1) for cut in cuts]
        ascending = all(a < b for a, b in pairwise(found))
        if not ascending or any(position < 0 or live_bytes[position] is None for position in found):
            raise UnlikeGraphsError(
                "the model cannot be cut at the same places in both graphs, because its operations differ between them"
            )
        return found

    return choose


def same_sections(
    operations: Sequence[Operation], cuts: Sequence[int], parameters: Sequence[Collection[str]]
) -> Callable[[Flow, Sequence[Cost]], list[int]]:
    """A chooser that gives each section no other parameters than it has in another graph.

    Between these limits it cuts where the other graph is cut, or as near as it can. A section may turn out empty: what
    it does in the other graph (dropout) is not done in this one.

    Args:
        operations: of the other graph, in order.
        cuts: positions after which it is cut, ascending.
        parameters: of each section of the other graph.

    Raises (when it is called):
        UnlikeGraphsError: an operation uses parameters of several sections, or nothing can be cut between two sections.
    """
    homes: dict[str, set[int]] = {}
    for section, names in enumerate(parameters):
        for name in names:
            homes.setdefault(name, set()).add(section)

    def choose(flow: Flow, _: Sequence[Cost]) -> list[int]:
        where = _aligned(operations, [operation(node) for node in flow.ops])
        live_bytes = flow.live_bytes()
        sections = [_sections_of(node, flow, homes) for node in flow.ops]
        found: list[int] = []
        # number: the section that ends at this cut. Ops of sections up to it stay before, those of later ones behind
        least = -1  # a cut in front of all operations: the section is empty
        for number, cut in enumerate(cuts):
            # an op with a tied parameter may be in several sections: only what must lie on one side limits the cut
            before = (i for i, may in enumerate(sections) if may is not None and max(may) <= number)
            after = (i for i, may in enumerate(sections) if may is not None and min(may) > number)
            least = max((least, *before))
            most = min(after, default=len(sections)) - 1
            free = [i for i in range(least, most + 1) if i < 0 or live_bytes[i] is not None]
            if not free:
                raise UnlikeGraphsError(
                    f"there is no place to cut between sections {number} and {number + 1}: their parameters are used "
                    "in another order"
                )
            # the op at the other graph's cut may be missing here (dropout): then the last one before it that is not
            goal = next((where[position] for position in range(cut, -1, -1) if position in where), -1)
            least = min(free, key=lambda i: abs(i - goal))
            found.append(least)
        return found

    return choose


def _sections_of(node: Node, flow: Flow, homes: Mapping[str, set[int]]) -> set[int] | None:
    """Sections that have all parameters that an operation reads; None if it reads none.

    Raises:
        UnlikeGraphsError: no section has them all.
    """
    names = [flow.capture.parameters[source.name] for source in _sources(node, flow)]
    if not names:
        return None
    found = set.intersection(*(homes.get(name, set()) for name in names))
    if not found:
        raise UnlikeGraphsError(f"no section has all parameters that {node} uses: {', '.join(sorted(set(names)))}")
    return found


def _sources(node: Node, flow: Flow) -> Iterable[Node]:
    return (source for source in node.all_input_nodes if source.name in flow.capture.parameters)


def _aligned(one: Sequence[Operation], other: Sequence[Operation]) -> dict[int, int]:
    """Position in ``one`` -> position of the same operation in ``other``."""
    if list(one) == list(other):
        return {position: position for position in range(len(one))}
    # autojunk ignores what occurs often in a long sequence: here the ops of every layer
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return {block.a + i: block.b + i for block in blocks for i in range(block.size)}
