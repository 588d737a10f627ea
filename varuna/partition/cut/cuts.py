"""Cut-points: few live bytes after equally heavy sections (paper §"Auto-partitioning").

Pure arithmetic over two curves along the graph: the cost of each op and the bytes that would cross a
cut after it. Besides, it is told which ops are layers: those that apply parameters. A model of 12 layers::

    position       0    1    2  |   3    4    5  |  ...  |  36    37
    op            up  gelu  down|  up  gelu  down|       | head  loss
    cost           4    1    4  |   4    1    4  |       |   6     1
    live bytes    17   17    4  |  17   17    4  |       |  50     -

    valleys       2, 5, ... 35  (and 36, the logits, which do not count: only the loss follows)
    3 requested   8, 17, 29     near 1/4, 2/4, 3/4 of the cost
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import median

MOST_SECTIONS = 256
NEIGHBOURHOOD = 0.05
"""A valley carries no more bytes than any position within this share of the total cost on either side."""
BUMP = 0.25
"""Distance, as a share of the total cost, over which lower places on both sides are searched for."""
LIGHTEST = 0.25
"""Sections lighter than this share of the median one join their neighbour."""


def choose_cuts(
    costs: Sequence[float],
    live_bytes: Sequence[float | None],
    requested: int | None = None,
    *,
    layers: Sequence[int] = (),
) -> list[int]:
    """Choose the positions to cut after, ascending.

    Args:
        costs: cost of each op, in graph order; any unit.
        live_bytes: bytes that cross a cut after each op; None where cutting is not allowed.
        requested: number of cut-points; fewer come back where the graph has fewer places to cut. None: as many
            valleys as there are, up to 255 of equal weight.
        layers: positions of the ops that apply parameters, ascending.
    """
    reached = list(accumulate(costs))
    total = reached[-1] if reached else 0.0
    # after the last op nothing is left to cut off; nor do ops that cost nothing make a section
    allowed = [i for i, size in enumerate(live_bytes[:-1]) if size is not None and 0 < reached[i] < total]
    if not allowed or total <= 0:
        return []
    found = _valleys(allowed, reached, live_bytes)
    valleys = _not_within_losses(_without_plateaus(found, reached, live_bytes), allowed, found, layers, live_bytes)
    if requested is None:
        # the more valleys, the smaller the median gap: the share of MOST_SECTIONS is a floor that does not shrink
        gaps = [b - a for a, b in pairwise([0.0, *(reached[i] for i in valleys), total])]
        spaced = _spaced(valleys, reached, max(total / MOST_SECTIONS / 2, LIGHTEST * median(gaps)))
        return spaced if len(spaced) < MOST_SECTIONS else _even(spaced, reached, MOST_SECTIONS - 1)
    narrow = _not_within_losses(allowed, allowed, found, layers, live_bytes)
    # fewer valleys than cuts asked for: any place outside of losses, then any place at all
    candidates = next((some for some in (valleys, narrow) if len(some) >= requested), allowed)
    return _lightest_in_windows(candidates, reached, live_bytes, requested)


def _valleys(allowed: Sequence[int], reached: Sequence[float], live_bytes: Sequence[float | None]) -> list[int]:
    """Positions that carry about the fewest bytes around them; one for each run of equal neighbours."""
    reach = reached[-1] * NEIGHBOURHOOD
    places = [reached[i] for i in allowed]
    valleys: list[int] = []
    for order, position in enumerate(allowed):
        low = bisect_left(places, places[order] - reach)
        high = bisect_left(places, places[order] + reach)
        size = _size(live_bytes, position)
        fewest = min(_size(live_bytes, near) for near in allowed[low : max(high, order + 1)])
        if size > fewest:
            continue
        if valleys and reached[valleys[-1]] == reached[position]:  # free ops (views) between the two: one place
            if size < _size(live_bytes, valleys[-1]):
                valleys[-1] = position
            continue
        valleys.append(position)
    return valleys


def _without_plateaus(
    valleys: Sequence[int], reached: Sequence[float], live_bytes: Sequence[float | None]
) -> list[int]:
    """Drop flat places inside a bump (the wide part of an MLP): places half as high lie on both sides of them.

    Nothing is alive before the graph and after it, so that a bump may lie at either end (logits).
    """
    reach, edge = reached[-1] * BUMP, reached[-1] * NEIGHBOURHOOD

    def lower(near: Sequence[int], position: int) -> bool:
        return any(2 * _size(live_bytes, other) < _size(live_bytes, position) for other in near)

    kept = []
    for position in valleys:
        left = [other for other in valleys if reached[position] - reach <= reached[other] < reached[position]]
        right = [other for other in valleys if reached[position] < reached[other] <= reached[position] + reach]
        rises = reached[position] <= edge or lower(left, position)
        falls = reached[-1] - reached[position] <= edge or lower(right, position)
        if not (rises and falls):
            kept.append(position)
    return kept


def _not_within_losses(
    positions: Sequence[int],
    allowed: Sequence[int],
    valleys: Sequence[int],
    layers: Sequence[int],
    live_bytes: Sequence[float | None],
) -> list[int]:
    """Drop places between a layer with a wide result (a head, logits) and the loss that makes few bytes of it.

    Ops without parameters have no state that a stage of their own would take off another, and to send so many bytes,
    or to keep them for backward, costs more than what they compute. So between two layers a cut must not carry more
    than twice the bytes of another place between the same two; and after the last layer, where nothing but the loss
    follows, not more than twice those of the last valley before that layer, however heavy head and loss are.
    """
    kept = []
    for position in positions:
        following = bisect_right(layers, position)
        begin = layers[following - 1] if following else 0
        if following < len(layers):
            instead = allowed[bisect_left(allowed, begin) : bisect_left(allowed, layers[following])]
        else:
            instead = valleys[: bisect_left(valleys, begin)][-1:]
        if not any(2 * _size(live_bytes, other) < _size(live_bytes, position) for other in instead):
            kept.append(position)
    return kept


def _size(live_bytes: Sequence[float | None], position: int) -> float:
    size = live_bytes[position]
    return float("inf") if size is None else size


def _spaced(positions: Sequence[int], reached: Sequence[float], least: float) -> list[int]:
    """Drop positions that would close a section lighter than ``least``."""
    kept: list[int] = []
    last = 0.0
    for position in positions:
        if reached[position] - last >= least and reached[-1] - reached[position] >= least:
            kept.append(position)
            last = reached[position]
    return kept


def _even(positions: Sequence[int], reached: Sequence[float], number: int) -> list[int]:
    """The ``number`` positions nearest to equal shares of the cost."""
    return _pick(positions, reached, number, lambda near, goal: min(near, key=lambda i: abs(reached[i] - goal)))


def _lightest_in_windows(
    candidates: Sequence[int], reached: Sequence[float], live_bytes: Sequence[float | None], number: int
) -> list[int]:
    """One cut near each equal share of the cost: the fewest bytes win, then the nearest."""
    return _pick(
        candidates,
        reached,
        number,
        lambda near, goal: min(near, key=lambda i: (_size(live_bytes, i), abs(reached[i] - goal))),
    )


def _pick(
    positions: Sequence[int], reached: Sequence[float], number: int, choose: Callable[[Sequence[int], float], int]
) -> list[int]:
    """Take ``choose`` of the positions within half a section around each of ``number`` goals."""
    # goal k of number has k shares before it: then number + 1 sections are equally heavy
    share = reached[-1] / (number + 1)
    chosen: set[int] = set()
    for k in range(1, number + 1):
        goal = share * k
        free = [i for i in positions if i not in chosen]
        # windows of half a share on either side do not overlap, so one goal does not take another one's place
        near = [i for i in free if abs(reached[i] - goal) <= share / 2] or free
        if near:
            # an empty window: the single nearest place, whatever crosses there
            in_reach = near if near is not free else [min(free, key=lambda i: abs(reached[i] - goal))]
            chosen.add(choose(in_reach, goal))
    return sorted(chosen)
