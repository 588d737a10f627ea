"""The same cuts in another graph of the same model: found by what the operations are and in which modules."""

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from varuna.core.errors import ModelError
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.graph.operations import Operation, operation


class UnlikeGraphsError(ModelError):
    """Two graphs of one model do not have the same places."""


def same_places(
    operations: Sequence[Operation], cuts: Sequence[int], *, nearest: bool = False
) -> Callable[[Flow, Sequence[Cost]], list[int]]:
    """A chooser that cuts a graph where another one is cut.

    Args:
        operations: of the other graph, in order.
        cuts: positions after which it is cut, ascending.
        nearest: where the operation in front of a cut is missing, take the last one before it that is there.

    Raises (when it is called):
        UnlikeGraphsError: a place is not there, or nothing can be cut there.
    """

    def choose(flow: Flow, _: Sequence[Cost]) -> list[int]:
        mine = [operation(node) for node in flow.ops]
        where = _aligned(operations, mine)
        live_bytes = flow.live_bytes()
        found = [_position(where, cut, nearest) for cut in cuts]
        ascending = all(a < b for a, b in pairwise(found))
        if not ascending or any(position < 0 or live_bytes[position] is None for position in found):
            raise UnlikeGraphsError(
                "the model cannot be cut at the same places in both graphs, because its operations differ between them"
            )
        return found

    return choose


def _aligned(one: Sequence[Operation], other: Sequence[Operation]) -> dict[int, int]:
    """Position in ``one`` -> position of the same operation in ``other``."""
    if list(one) == list(other):
        return {position: position for position in range(len(one))}
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return {block.a + i: block.b + i for block in blocks for i in range(block.size)}


def _position(where: Mapping[int, int], cut: int, nearest: bool) -> int:
    """Position of a cut in the other graph; -1 if there is none."""
    if nearest:
        cut = next((position for position in range(cut, -1, -1) if position in where), -1)
    return where.get(cut, -1)
