"""Who sits where in a new generation, so that as little state as possible moves. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from varuna.core.messages import Transfer
from varuna.core.plan import Plan
from varuna.core.shares import Holders, held_by

Holdings = Mapping[str, frozenset[int]]
"""Sections whose state each worker has, at the common next step: whole, or (lent) without optimizer state."""
_NOTHING: frozenset[int] = frozenset()


def seat(
    plan: Plan,
    workers: Sequence[str],
    holdings: Holdings,
    weights: Sequence[int],
    *,
    nodes: Mapping[str, str] | None = None,
    kept: Sequence[str] = (),
    lent: Holdings | None = None,
    holders: Holders | None = None,
) -> tuple[str, ...]:
    """Worker of each rank, spares after the grid.

    Greedy: the pair of worker and stage that shares most bytes is seated first. Among equals, who comes
    earlier in ``workers`` gets the lower rank, so a caller that lists the members by their old rank keeps
    rank 0 (whose output people read) where it is. A worker that may sit in several replicas sits beside
    one of its own node, since what neighbours say to each other then does not cross the network.

    Args:
        plan: at most as many ranks as there are workers.
        workers: everybody who may be seated.
        holdings: sections that each worker has whole; a worker that is missing has none.
        weights: bytes of each section's state.
        nodes: VM of each worker; without it, all are on VMs of their own.
        kept: the grid that ran this same plan before: whoever still has its state keeps its seat.
        lent: sections that each worker has without optimizer state.
        holders: by section, the replicas that will hold it whole; None: all.
    """
    wanted = _Wanted(plan, holders)
    seating = _Seating(plan, nodes or {worker: worker for worker in workers})
    standing = dict(enumerate(workers))
    order_of = {worker: order for order, worker in standing.items()}
    for rank, worker in enumerate(kept):
        if worker in order_of and holdings.get(worker, _NOTHING).issuperset(wanted.whole(rank)):
            seating.sit(rank, standing.pop(order_of[worker]))
    known = {worker: holdings.get(worker, _NOTHING) | (lent or {}).get(worker, _NOTHING) for worker in workers}
    shared_bytes = {
        (order, stage): sum(weights[section] for section in plan.sections_of(stage) if section in known[worker])
        for order, worker in standing.items()
        if known[worker]
        for stage in range(plan.stages)
    }
    for order, stage in sorted(shared_bytes, key=lambda pair: (-shared_bytes[pair], pair)):
        if shared_bytes[order, stage] and order in standing and seating.free_at(stage):
            worker = standing.pop(order)
            matched = {
                rank: sum(
                    weights[section] for section in wanted.whole(rank) if section in holdings.get(worker, _NOTHING)
                )
                for rank in seating.free_at(stage)
            }
            seating.sit(seating.best_rank(worker, matched), worker)
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

    def best_rank(self, worker: str, matched: Mapping[int, int]) -> int:
        """Of free ranks, the one with most neighbours of the worker's node.

        Among equals the one whose state the worker has most bytes of (``matched``), then the lowest.
        """
        return max(matched, key=lambda rank: (self._neighbours(rank, self.nodes[worker]), matched[rank], -rank))

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


class _Wanted:
    """What the seats of a plan want."""

    def __init__(self, plan: Plan, holders: Holders | None) -> None:
        self._plan, self._holders = plan, holders

    def whole(self, rank: int) -> tuple[int, ...]:
        """Sections that a rank needs with their optimizer state."""
        replica, stage = self._plan.place_of(rank)
        sections = self._plan.sections_of(stage)
        return tuple(sections) if self._holders is None else held_by(self._holders, sections, replica)


def uncovered(sections: int, holdings: Holdings) -> tuple[int, ...]:
    """Sections that nobody has whole."""
    held = frozenset[int]().union(*holdings.values())
    return tuple(section for section in range(sections) if section not in held)


def transfers(
    plan: Plan,
    members: Sequence[str],
    holdings: Holdings,
    weights: Sequence[int],
    *,
    lent: Holdings | None = None,
    holders: Holders | None = None,
) -> tuple[Transfer, ...]:
    """Copies that give each seat its sections, with the bytes spread evenly over the sources.

    Every section must be whole with one of ``members`` (see ``uncovered``). ``lent`` and ``holders`` as for ``seat``.
    """
    wanted = _Wanted(plan, holders)
    whole = [holdings.get(worker, _NOTHING) for worker in members]
    known = [own | (lent or {}).get(worker, _NOTHING) for own, worker in zip(whole, members, strict=True)]
    sources = {False: _ranks_by_section(plan.sections, whole), True: _ranks_by_section(plan.sections, known)}
    sent_bytes = [0] * len(members)
    moves = []
    for rank in range(plan.workers):
        updated = wanted.whole(rank)
        for section in plan.sections_of(plan.place_of(rank).stage):
            is_lent = section not in updated
            had = known if is_lent else whole
            if section not in had[rank]:
                source = min(sources[is_lent][section], key=lambda source: (sent_bytes[source], source))
                sent_bytes[source] += weights[section]
                moves.append(Transfer(section=section, source_rank=source, target_rank=rank, lent=is_lent))
    return tuple(moves)


def _ranks_by_section(sections: int, holdings: Sequence[frozenset[int]]) -> list[list[int]]:
    """Ranks that have each section, ascending: looked up once, since a large fleet moves thousands."""
    ranks: list[list[int]] = [[] for _ in range(sections)]
    for rank, held in enumerate(holdings):
        for section in held:
            ranks[section].append(rank)
    return ranks
