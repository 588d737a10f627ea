"""Keepers of copies, of state and of sums of gradients. Pure."""

from collections import Counter
from collections.abc import Sequence

from varuna.core.plan import Copies, Plan

_SHIFTS_TRIED = 8
"""Of each kind: a large fleet has thousands of ranks."""


def copy_holders(plan: Plan, nodes: Sequence[str], regions: Sequence[str] = ()) -> tuple[int | None, ...]:
    """By rank, who keeps its copies; () if none are made. Each rank keeps those of one at most.

    They are on other nodes, since a node takes all its workers with it; all are alike if there is one node only. Where
    one node has most of the ranks, state has a copy there all the same, and sums, which are worth less, have none. Two
    keep each other's state: of all pairs that may be lost at once, half as many take a state along as in a ring.
    Copies stay in a region that has several nodes.

    Args:
        plan: of the generation.
        nodes: VM of each rank.
        regions: of each rank; (): all are in one.
    """
    if not plan.copies.are_made or plan.workers < 2:
        return ()
    by_region: dict[str, list[int]] = {}
    for rank in range(plan.workers):
        by_region.setdefault(regions[rank] if regions else "", []).append(rank)
    first, *groups = sorted(by_region.values(), key=len, reverse=True)
    for group in list(groups):
        if len({nodes[rank] for rank in group}) < 2:  # has nobody to go to
            groups.remove(group)
            first = sorted([*first, *group])
    found: dict[int, int | None] = {}
    for group in (first, *groups):
        stages = plan.pipeline_of(plan.place_of(group[0]).replica).stages
        places = _places(plan.copies, stages, [nodes[rank] for rank in group])
        found |= {group[own]: None if kept is None else group[kept] for own, kept in enumerate(places)}
    return tuple(found[rank] for rank in range(plan.workers))


def _places(copies: Copies, stages: int, nodes: Sequence[str]) -> Sequence[int | None]:
    """By place in a row of ranks, with so many stages a replica, the place of who keeps its copies."""
    count, row = len(nodes), range(len(nodes))
    if len(set(nodes)) == 1:
        nodes = list(map(str, row))
    shifts = range(1, min(count, 1 + _SHIFTS_TRIED))
    tried = [[(place + shift) % count for place in row] for shift in shifts]
    if copies is Copies.STATE:
        tried.insert(0, _in_pairs(count))
    else:  # replicas first: who runs the same sections goes on from a copy of their sums without moving it
        tried[:0] = [
            [(place + shift) % count for place in row] for shift in range(stages, count, stages)[:_SHIFTS_TRIED]
        ]
    for found in tried:
        if all(nodes[place] != nodes[keeper] for place, keeper in zip(row, found, strict=True)):
            return found
    # Past the largest node, in a row in which each node's ranks are together, and the largest node's come first.
    sizes = Counter(nodes)
    together = sorted(row, key=lambda place: (-sizes[nodes[place]], nodes[place], place))
    most = max(sizes.values())
    by_place = {place: together[(at + most) % count] for at, place in enumerate(together)}
    is_kept = copies is Copies.STATE
    return [by_place[place] if is_kept or nodes[place] != nodes[by_place[place]] else None for place in row]


def _in_pairs(workers: int) -> list[int]:
    """By rank, the other one of its pair; of an odd number, the last three are in a ring."""
    half = (workers - workers % 2 * 3) // 2
    pairs = [(rank + half) % (2 * half) for rank in range(2 * half)]
    return [*pairs, *(2 * half + (place + 1) % 3 for place in range(workers - 2 * half))]
