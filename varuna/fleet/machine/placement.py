"""Seats of a new generation's workers, chosen so that as little state as possible moves. Pure."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from varuna.core.devices import are_enough
from varuna.core.messages import Transfer
from varuna.core.plan import Plan
from varuna.core.sharded_optimizer import Holders, held_by

Holdings = Mapping[str, frozenset[int]]
"""Sections whose state each worker has, at the common next step: whole, or (lent) without optimizer state."""
_NOTHING: frozenset[int] = frozenset()
_LOOKED_AT = 64
"""Newest ranks of a zone beside which somebody may sit: a zone may have thousands."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be seated, and what speaks for a seat."""

    name: str
    whole: frozenset[int] = _NOTHING
    """Sections whose state it has."""
    lent: frozenset[int] = _NOTHING
    """Sections that it has without optimizer state."""
    ran: frozenset[int] = _NOTHING
    """Sections that it ran last; what else it has is a copy."""
    node: str = ""
    """Its VM; empty: one of its own."""
    zone: str = ""
    device_class: str = ""
    speed: float = 1.0
    """Relative to the fastest ones."""

    @property
    def known(self) -> frozenset[int]:
        """Sections that it has, whole or lent."""
        return self.whole | self.lent


def seat(
    plan: Plan,
    candidates: Sequence[Candidate],
    weights: Sequence[int],
    *,
    kept: Sequence[str] = (),
    holders: Holders | None = None,
) -> tuple[str, ...]:
    """Worker of each rank, spares after the grid: pipelines of one speed are seated together.

    Greedy: the pair of worker and stage that shares most bytes is seated first. Among equals, a stage comes first
    that fewer others could run as well, and who ran most of it before who keeps a copy of it, whose sums of gradients
    are older. Among equals still, who comes earlier in ``candidates`` gets the lower rank, so a caller that lists the
    members by their old rank keeps rank 0 (whose output people read) where it is. A worker that may sit in several
    replicas sits beside one of its own node, since what neighbours say to each other then does not cross the network,
    or else of its own zone, where a network is fast and costs nothing.

    Args:
        plan: at most as many ranks as there are candidates; if it is for workers of equal speed, slower ones sit only
            where others are too few.
        candidates: of equally fast ones the first are seated.
        weights: bytes of each section's state.
        kept: the grid that ran this same plan before: whoever still has its state keeps its seat.
        holders: by section, the replicas that will hold it whole; None: all.
    """
    waiting = {each.name: each for each in candidates}
    seats: dict[int, str] = {}
    for speed in sorted(set(plan.speeds), reverse=True) or (1.0,):
        group = [replica for replica in range(plan.replicas) if plan.speed_of(replica) == speed]
        ranks = [rank for replica in group for rank in plan.ranks_of(replica)]
        part = _plan_of(plan, group)
        # More may be fast enough than there are seats: those whose state fits best get them.
        found = _seat_alike(
            part,
            _fast_enough(part, waiting.values(), speed),
            weights,
            kept=[kept[rank] for rank in ranks] if kept else (),
            holders=None if holders is None else _of_replicas(holders, group),
        )
        for rank, name in zip(ranks, found, strict=True):
            seats[rank] = name
            del waiting[name]
    spares = sorted(waiting.values(), key=lambda each: -each.speed)
    return (*(seats[rank] for rank in range(plan.workers)), *(each.name for each in spares))


def _seat_alike(
    plan: Plan, candidates: Sequence[Candidate], weights: Sequence[int], *, kept: Sequence[str], holders: Holders | None
) -> tuple[str, ...]:
    """Worker of each rank of a plan whose pipelines are equally fast."""
    wanted = _Wanted(plan, holders)
    seating = _Seating(plan, candidates)
    standing = dict(enumerate(candidates))
    order_of = {each.name: order for order, each in standing.items()}
    for rank, name in enumerate(kept):
        order = order_of.get(name)
        if order is not None and standing[order].whole.issuperset(wanted.whole(rank)):
            seating.sit(rank, standing.pop(order).name)

    slots = plan.slots
    wanted_class = [plan.class_of(slot.ranks[0]) for slot in slots]

    def class_of(candidate: Candidate) -> str:
        return candidate.device_class if plan.is_by_class else ""

    def shared_bytes(sections: frozenset[int], slot: int) -> int:
        return sum(weights[section] for section in slots[slot].sections if section in sections)

    shared = {
        (order, slot): (shared_bytes(each.known, slot), shared_bytes(each.known & each.ran, slot))
        for order, each in standing.items()
        if each.known
        for slot in range(len(slots))
        if wanted_class[slot] == class_of(each)
    }
    rivals = Counter((slot, whole) for (_, slot), (whole, _) in shared.items())

    def urgency(pair: tuple[int, int]) -> tuple[int, int, int, tuple[int, int]]:
        whole, ran = shared[pair]
        return -whole, rivals[pair[1], whole], -ran, pair

    for order, slot in sorted(shared, key=urgency):
        if shared[order, slot][0] and order in standing and seating.free[slot]:
            worker = standing.pop(order)

            def matched(rank: int, held: frozenset[int] = worker.whole) -> int:
                return sum(weights[section] for section in wanted.whole(rank) if section in held)

            seating.sit(seating.best_rank(worker.name, slot, None if holders is None else matched), worker.name)
    queues = {
        name: _Queue({order: each.name for order, each in standing.items() if class_of(each) == name}, seating)
        for name in {*wanted_class}
    }
    for rank in range(plan.workers):
        if rank not in seating.seats:
            order = queues[wanted_class[plan.slot_of(rank)]].take_seat(rank)
            seating.sit(rank, standing.pop(order).name)
    return tuple(seating.seats[rank] for rank in range(plan.workers))


def _fast_enough(plan: Plan, candidates: Collection[Candidate], speed: float) -> list[Candidate]:
    """Those of this speed at least; if that is too few for the plan, also the next slower ones."""
    found = list[Candidate]()
    for least in sorted({speed, *(each.speed for each in candidates if each.speed < speed)}, reverse=True):
        found = [each for each in candidates if each.speed >= least]
        if are_enough(plan.classes, Counter(each.device_class for each in found)):
            break
    return found


def _plan_of(plan: Plan, group: Sequence[int]) -> Plan:
    """These replicas of a plan alone, as if they were equally fast."""
    counts = [(sum(replica in replicas for replica in group), pipeline) for replicas, pipeline in plan.kinds]
    return plan.model_copy(
        update={
            "pipelines": tuple(
                pipeline.model_copy(update={"replicas": count, "pace": 1.0, "speeds": ()})
                for count, pipeline in counts
                if count
            )
        }
    )


def _of_replicas(holders: Holders, group: Sequence[int]) -> Holders:
    """Return the holders of whole sections among these replicas, by their places among them."""
    place_of = {replica: place for place, replica in enumerate(group)}
    return tuple(tuple(place_of[replica] for replica in each if replica in place_of) for each in holders)


class _Seating:
    """Workers' ranks so far, and which free ranks are beside workers of a node, or of its zone."""

    def __init__(self, plan: Plan, candidates: Sequence[Candidate]) -> None:
        self.plan, self._depths = plan, plan.depths
        self.nodes = {each.name: each.node or each.name for each in candidates}
        self.zones = {each.name: each.zone for each in candidates}
        self.seats: dict[int, str] = {}
        self.free = [dict.fromkeys(slot.ranks) for slot in plan.slots]
        """By slot of the plan: its free ranks, ascending."""
        self._at: dict[str, list[int]] = {}  # by node: the ranks of its workers
        self._in: dict[str, list[int]] = {}  # by zone, where there are several
        self._has_zones = len(set(self.zones.values())) > 1

    def sit(self, rank: int, worker: str) -> None:
        """Give a worker a free rank."""
        self.seats[rank] = worker
        del self.free[self.plan.slot_of(rank)][rank]
        self._at.setdefault(self.nodes[worker], []).append(rank)
        if self._has_zones:
            self._in.setdefault(self.zones[worker], []).append(rank)

    def best_rank(self, worker: str, slot: int, matched: Callable[[int], int] | None) -> int:
        """The free rank of a slot that has most neighbours of the worker's node, and then of its zone.

        Among equals the one whose state the worker has most bytes of (``matched``; None: it is all the same), then the
        lowest. Where nothing is matched, only ranks beside the worker's node or zone and the first one have to be
        looked at.
        """
        free, node, zone = self.free[slot], self.nodes[worker], self.zones[worker]

        def fits(rank: int) -> tuple[int, int, int, int]:
            near = self.beside(rank, self.nodes)[node], self.beside(rank, self.zones)[zone] if self._has_zones else 0
            return *near, 0 if matched is None else matched(rank), -rank

        if matched is None:
            seated = (*self._at.get(node, ()), *self._in.get(zone, ())[-_LOOKED_AT:])
            beside = (near for rank in seated for near in self._neighbours(rank))
            ranks: set[int] = {next(iter(free)), *(rank for rank in beside if rank in free)}
            return max(ranks, key=fits)
        return max(free, key=fits)

    def beside(self, rank: int, places: Mapping[str, str]) -> Counter[str]:
        """Count a rank's neighbours in the pipeline at each place: nodes, or zones."""
        return Counter(places[self.seats[other]] for other in self._neighbours(rank) if other in self.seats)

    def _neighbours(self, rank: int) -> list[int]:
        replica, stage = self.plan.place_of(rank)
        return [self.plan.rank_of(replica, k) for k in (stage - 1, stage + 1) if 0 <= k < self._depths[replica]]


class _Queue:
    """Workers that hold nothing and wait for a seat: by zone, and in it by node."""

    def __init__(self, standing: Mapping[int, str], seating: _Seating) -> None:
        self._seating = seating
        by_zone: dict[str, dict[int, str]] = {}
        for order, worker in standing.items():
            by_zone.setdefault(seating.zones[worker], {})[order] = worker
        self._zones = {zone: _Crowds(workers, seating.nodes) for zone, workers in by_zone.items()}

    def take_seat(self, rank: int) -> int:
        """Take one whose node, or else whose zone, is beside the seat, else of the fullest zone and node."""
        seating, nodes = self._seating, self._seating.beside(rank, self._seating.nodes)
        for crowds in self._zones.values():
            if (order := crowds.take_beside(nodes)) is not None:
                return order
        beside = seating.beside(rank, seating.zones)
        waiting = {zone: crowds for zone, crowds in self._zones.items() if crowds.size}
        return waiting[max(waiting, key=lambda zone: (beside[zone], waiting[zone].size))].take_fullest()


class _Crowds:
    """Workers of one zone that wait for a seat, by node."""

    def __init__(self, standing: Mapping[int, str], nodes: Mapping[str, str]) -> None:
        self._crowds: dict[str, deque[int]] = {}
        for order, worker in standing.items():
            self._crowds.setdefault(nodes[worker], deque()).append(order)
        self.size = len(standing)
        self._fullest = [(-len(crowd), crowd[0], node) for node, crowd in self._crowds.items()]
        heapify(self._fullest)

    def take_beside(self, beside: Mapping[str, int]) -> int | None:
        """The order of one whose node is beside the seat, if there is one; of several nodes, of the fullest."""
        near = [node for node in beside if self._crowds.get(node)]
        if not near:
            return None
        crowds = self._crowds
        return self._take(max(near, key=lambda node: (beside[node], len(crowds[node]), -crowds[node][0])))

    def take_fullest(self) -> int:
        """The order of one of the fullest node; among equals, the first."""
        while True:  # what was put in before somebody of that node was seated is out of date
            size, first, node = heappop(self._fullest)
            crowd = self._crowds[node]
            if crowd and (-len(crowd), crowd[0]) == (size, first):
                return self._take(node)

    def _take(self, node: str) -> int:
        self.size -= 1
        order = self._crowds[node].popleft()
        if self._crowds[node]:
            heappush(self._fullest, (-len(self._crowds[node]), self._crowds[node][0], node))
        return order


class _Wanted:
    """Sections that the seats of a plan need."""

    def __init__(self, plan: Plan, holders: Holders | None) -> None:
        self._plan, self._holders = plan, holders

    def whole(self, rank: int) -> tuple[int, ...]:
        """Sections that a rank needs with their optimizer state."""
        replica, sections = self._plan.place_of(rank).replica, self._plan.sections_at(rank)
        return tuple(sections) if self._holders is None else held_by(self._holders, sections, replica)


def uncovered(sections: int, holdings: Holdings) -> tuple[int, ...]:
    """Sections that no worker has whole."""
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
    following: Container[int] = (),
    regions: Sequence[str] = (),
) -> tuple[Transfer, ...]:
    """Copies that give each seat its sections, with the bytes spread evenly over the sources.

    Every section must be whole with one of ``members`` (see ``uncovered``).

    Args:
        plan: of the new generation.
        members: worker of each rank, spares after the grid.
        holdings: sections that each worker has whole.
        weights: bytes of each section's state.
        lent: sections that each worker has without optimizer state.
        holders: by section, the replicas that will hold it whole; None: all.
        following: sections whose optimizer state may come while the first step runs.
        regions: of each of ``members``, whose own has it from there; (): all are in one.
    """
    wanted = _Wanted(plan, holders)
    whole = [holdings.get(worker, _NOTHING) for worker in members]
    known = [own | (lent or {}).get(worker, _NOTHING) for own, worker in zip(whole, members, strict=True)]
    sources = {False: _ranks_by_section(plan.sections, whole), True: _ranks_by_section(plan.sections, known)}
    sent_bytes = [0] * len(members)
    moves = []
    for rank in range(plan.workers):
        updated = wanted.whole(rank)
        for section in plan.sections_at(rank):
            is_lent = section not in updated
            had = known if is_lent else whole
            if section not in had[rank]:
                source = min(
                    sources[is_lent][section],
                    key=lambda source: (bool(regions) and regions[source] != regions[rank], sent_bytes[source], source),
                )
                sent_bytes[source] += weights[section]
                follows = not is_lent and section in following
                moves.append(
                    Transfer(section=section, source_rank=source, target_rank=rank, lent=is_lent, follows=follows)
                )
    return tuple(moves)


def _ranks_by_section(sections: int, holdings: Sequence[frozenset[int]]) -> list[list[int]]:
    """Ranks that have each section, ascending: looked up once, since a large fleet moves thousands."""
    ranks: list[list[int]] = [[] for _ in range(sections)]
    for rank, held in enumerate(holdings):
        for section in held:
            ranks[section].append(rank)
    return ranks
