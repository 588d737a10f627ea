"""Who sits where in a new generation, so that as little state as possible moves. Pure."""

from collections.abc import Mapping, Sequence

from varuna.core.messages import Transfer
from varuna.core.plan import Plan

Holdings = Mapping[str, frozenset[int]]
"""Sections whose state each worker has, complete at the common next step."""


def seat(plan: Plan, workers: Sequence[str], holdings: Holdings, weights: Sequence[int]) -> tuple[str, ...]:
    """Worker of each rank, the spares behind the grid.

    Greedy: the pair of worker and stage that shares most bytes is seated first. Among equals, who comes
    earlier in ``workers`` gets the lower rank, so a caller that lists the members by their old rank keeps
    rank 0 (whose output people read) where it is.

    Args:
        plan: at most as many ranks as there are workers.
        workers: everybody alive.
        holdings: sections of each worker; a worker that is missing has none.
        weights: bytes of each section's state.
    """
    free = {stage: [plan.rank_of(replica, stage) for replica in range(plan.replicas)] for stage in range(plan.stages)}
    shared_bytes = {
        (order, stage): sum(weights[section] for section in plan.sections_of(stage) if section in holdings[worker])
        for order, worker in enumerate(workers)
        if holdings.get(worker)
        for stage in free
    }
    seats: dict[int, str] = {}
    standing = dict(enumerate(workers))
    for order, stage in sorted(shared_bytes, key=lambda pair: (-shared_bytes[pair], pair)):
        if shared_bytes[order, stage] and order in standing and free[stage]:
            seats[free[stage].pop(0)] = standing.pop(order)
    rest = iter(standing.values())
    grid = [seats.get(rank) or next(rest) for rank in range(plan.workers)]
    return (*grid, *rest)


def uncovered(sections: int, holdings: Holdings) -> tuple[int, ...]:
    """Sections whose state nobody has."""
    held = frozenset[int]().union(*holdings.values())
    return tuple(section for section in range(sections) if section not in held)


def transfers(plan: Plan, members: Sequence[str], holdings: Holdings, weights: Sequence[int]) -> tuple[Transfer, ...]:
    """Copies that give each seat its sections, with the bytes spread evenly over the holders.

    Every section must have a holder among ``members`` (see ``uncovered``).
    """
    holders = {
        section: [rank for rank, worker in enumerate(members) if section in holdings.get(worker, frozenset())]
        for section in range(plan.sections)
    }
    sent_bytes = [0] * len(members)
    moves = []
    for rank in range(plan.workers):
        held = holdings.get(members[rank], frozenset())
        for section in plan.sections_of(plan.place_of(rank).stage):
            if section not in held:
                source = min(holders[section], key=lambda holder: (sent_bytes[holder], holder))
                sent_bytes[source] += weights[section]
                moves.append(Transfer(section=section, source_rank=source, target_rank=rank))
    return tuple(moves)
