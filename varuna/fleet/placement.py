"""Who sits where in a new generation, so that as little state as possible moves. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from varuna.core.messages import Transfer
from varuna.core.plan import Plan

Holdings = Mapping[str, frozenset[int]]
"""Sections whose state each worker has, complete at the common next step."""


def seat(
    plan: Plan,
    workers: Sequence[str],
    holdings: Holdings,
    weights: Sequence[int],
    *,
    nodes: Mapping[str, str] | None = None,
    kept: Sequence[str] = (),
) -> tuple[str, ...]:
    """Worker of each rank, the spares behind the grid.

    Greedy: the pair of worker and stage that shares most bytes is seated first. Among equals, who comes
    earlier in ``workers`` gets the lower rank, so a caller that lists the members by their old rank keeps
    rank 0 (whose output people read) where it is. A worker that may sit in several replicas sits beside
    one of its own node, since what neighbours say to each other then does not cross the network.

    Args:
        plan: at most as many ranks as there are workers.
        workers: everybody who may be seated.
        holdings: sections of each worker; a worker that is missing has none.
        weights: bytes of each section's state.
        nodes: VM of each worker; without it, all are on VMs of their own.
        kept: the grid that ran this same plan before: whoever still has its state keeps its seat.
    """
    seating = _Seating(plan, nodes or {worker: worker for worker in workers})
    standing = dict(enumerate(workers))
    order_of = {worker: order for order, worker in standing.items()}
    for rank, worker in enumerate(kept):
        if worker in order_of and holdings.get(worker, frozenset()).issuperset(
            plan.sections_of(plan.place_of(rank).stage)
        ):
            seating.sit(rank, standing.pop(order_of[worker]))
    shared_bytes = {
        (order, stage): sum(weights[section] for section in plan.sections_of(stage) if section in holdings[worker])
        for order, worker in standing.items()
        if holdings.get(worker)
        for stage in range(plan.stages)
    }
    for order, stage in sorted(shared_bytes, key=lambda pair: (-shared_bytes[pair], pair)):
        if shared_bytes[order, stage] and order in standing and seating.free_at(stage):
            worker = standing.pop(order)
            seating.sit(seating.best_rank(worker, seating.free_at(stage)), worker)
    for rank in range(plan.workers):
        if rank not in seating.seats:
            seating.sit(rank, standing.pop(seating.best_order(rank, standing)))
    return (*(seating.seats[rank] for rank in range(plan.workers)), *standing.values())


class _Seating:
    """Who sits where so far, and who would sit beside a worker of the same node."""

    def __init__(self, plan: Plan, nodes: Mapping[str, str]) -> None:
        self.plan, self.nodes = plan, nodes
        self.seats: dict[int, str] = {}

    def sit(self, rank: int, worker: str) -> None:
        """Take a free seat."""
        self.seats[rank] = worker

    def free_at(self, stage: int) -> list[int]:
        """Free ranks of a stage, ascending."""
        return [rank for rank in range(stage, self.plan.workers, self.plan.stages) if rank not in self.seats]

    def best_rank(self, worker: str, ranks: Sequence[int]) -> int:
        """Of free ranks, the one with most neighbours of the worker's node; the lowest among equals."""
        return max(ranks, key=lambda rank: (self._neighbours(rank, self.nodes[worker]), -rank))

    def best_order(self, rank: int, standing: Mapping[int, str]) -> int:
        """Of workers that hold nothing, one whose node is beside the seat, else one of the fullest node."""
        crowd = Counter(self.nodes[worker] for worker in standing.values())

        def merit(order: int) -> tuple[int, int, int]:
            node = self.nodes[standing[order]]
            alone = len(crowd) == len(standing)  # one worker per node: their order is all that counts
            return self._neighbours(rank, node), 0 if alone else crowd[node], -order

        return max(standing, key=merit)

    def _neighbours(self, rank: int, node: str) -> int:
        """Neighbours in the pipeline that sit on ``node``."""
        replica, stage = self.plan.place_of(rank)
        beside = [self.plan.rank_of(replica, k) for k in (stage - 1, stage + 1) if 0 <= k < self.plan.stages]
        return sum(other in self.seats and self.nodes[self.seats[other]] == node for other in beside)


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
