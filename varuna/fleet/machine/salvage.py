"""Parts of the step in flight that the next generation keeps: sums of gradients that outlast a loss. Pure.

Sums are used only for the same step, on top of the same parameters. Where a section moves, they move too, unless their
micro-batches are computed again sooner. A wrong set costs time, never the run: the vote counts what is in the sums.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from varuna.core.messages import Transfer
from varuna.core.plan import Plan
from varuna.core.sums import IndexSet, MicroBatchLoss, RemainingWork, SumLocation, SumsAt, count, remainder, spans_of
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.morph_gain import LINK_BYTES_PER_S, sums_s
from varuna.fleet.state.run_events import GenerationRecord
from varuna.fleet.state.worker import WorkerInventory

_REMEMBERED = 50
"""Generations in which a step was broken off, at most, that tell whether sums are kept."""
_LEAST_LEFT_S = 10.0
"""Of a step: less is waited for."""
_CLEARLY = 1.5
"""So many times as much must be gained as a morph in the middle of a step costs."""


def salvage(fleet: Fleet, plan: Plan, members: Sequence[str], next_step: int) -> RemainingWork | None:
    """Return the work that is left of the step that was broken off; None: all of it.

    Args:
        fleet: all its members stand still.
        plan: of the next generation.
        members: worker of each rank, spares after the grid.
        next_step: that every state contains.
    """
    if not fleet.history:
        return None
    holdings = _holdings(fleet, members)
    if any(holding.wrong_sums and holding.next_step == next_step for holding in holdings):
        return None  # who was stopped before it heard of that offers them all the same
    held = [_sums(holding, rank, plan, next_step) for rank, holding in enumerate(holdings)]
    none = {section for each in holdings if each.sums for section in each.sums.without}
    seats = {section: plan.homes_of(section) for section in range(plan.sections)}
    offered = {
        section: {at: spans for sums in held for at, spans in sums.get(section, {}).items()}
        for section in seats
        if section not in none
    }
    here = {
        section: {at: spans for at, spans in sums.items() if at.rank in seats[section]}
        for section, sums in offered.items()
    }
    known = spans_of(losses_of(fleet, members, plan))

    def left_of(sums: Mapping[int, SumsAt]) -> RemainingWork | None:
        return remainder(plan.micro_batches, plan.replicas, seats, sums, known, ends_of=plan.ends_of)

    staying, moving = left_of(here), left_of(offered) if offered != here else None
    more = (moving.kept if moving is not None else 0) - (staying.kept if staying is not None else 0)
    step_s = fleet.recorded.wall_s or plan.step_s
    return moving if more * step_s / plan.micro_batches > moving_s(fleet, sums_moved(moving)) else staying


def moving_s(fleet: Fleet, sums: Sequence[Transfer]) -> float:
    """Seconds that sums of gradients take between workers: those of the rank that sends or receives most."""
    assert fleet.job is not None
    sections = fleet.job.model.sections
    sent, received = Counter[int](), Counter[int]()
    for each in sums:
        sent[each.source_rank] += sections[each.section].summed_bytes
        received[each.target_rank] += sections[each.section].summed_bytes
    most_bytes = max((*sent.values(), *received.values()), default=0)
    return most_bytes / (fleet.speeds.link_bytes_per_s or LINK_BYTES_PER_S)


def sums_moved(left: RemainingWork | None) -> tuple[Transfer, ...]:
    """Sums that their holders send to others."""
    return tuple(
        Transfer(section=each.section, source_rank=each.source_rank, target_rank=rank, sums=True, copied=each.copied)
        for rank, sums in enumerate(left.taken if left is not None else ())
        for each in sums
        if each.source_rank != rank
    )


def _sums(holding: WorkerInventory, rank: int, plan: Plan, next_step: int) -> Mapping[int, SumsAt]:
    """By section, what is in the sums of a worker, and in those that it keeps copies of, if they are of this step."""
    sums = holding.sums
    if sums is None or holding.next_step != next_step or sums.micro_batch != plan.micro_batch:
        return {}
    found: defaultdict[int, dict[SumLocation, IndexSet]] = defaultdict(dict)
    for copied, parts in ((False, sums.sections), (True, sums.copies)):
        for each in parts:
            found[each.section][SumLocation(rank, copied)] = each.micro_batches
    return found


def is_in_whole_replica(fleet: Fleet, name: str) -> bool:
    """Whether all stages of a worker's replica are left, so that their sums have the same micro-batches."""
    if not fleet.history or not fleet.record.has_seat(name):
        return False
    plan = fleet.record.plan
    replica = plan.place_of(fleet.record.ranks[name]).replica
    return all(fleet.is_joined(fleet.members[rank]) for rank in plan.ranks_of(replica))


def losses_of(fleet: Fleet, members: Sequence[str], plan: Plan) -> Mapping[int, MicroBatchLoss]:
    """Losses of the step in flight that any of the members knows, by micro-batch."""
    sums = (holding.sums for holding in _holdings(fleet, members))
    known = (each for held in sums if held and held.micro_batch == plan.micro_batch for each in held.losses)
    return {each.micro_batch: each for each in known}


def share_of_step(record: GenerationRecord) -> float:
    """Return the share of a whole step's time that a generation's first step takes, if a part of the step is kept."""
    plan, left = record.plan, record.remainder
    if left is None:
        return 1.0
    depths = plan.depths  # P - 1 forwards before the last stage has work, and as many backwards after it has none

    def longest(counts: Iterable[int]) -> float:
        return max((n + depths[replica] - 1) / plan.rate_of(replica) for replica, n in enumerate(counts))

    return longest(map(count, left.work)) / longest(plan.shares)


def break_off_limit_s(fleet: Fleet, plan: Plan, faster: float, now_s: float) -> float | None:
    """Seconds that the step in flight still takes, if a planned morph does not wait for its end; None: it does.

    It does not where the rest of the step is so much faster by the new plan that this clearly exceeds what only a morph
    in the middle of a step costs: moving sums of gradients, and what is in flight. That sums are kept at all is known
    from a step that was broken off before.

    Args:
        fleet: it runs steps.
        plan: of the next generation.
        faster: share of a step's time that goes away by it.
        now_s: the time.
    """
    if not fleet.formed or not fleet.recorded.wall_s or fleet.job is None:
        return None
    if not any(record.kept_micro_batches for record in fleet.history[-_REMEMBERED:]):
        return None
    left_s = fleet.recorded.at_s + fleet.recorded.wall_s - now_s
    old = fleet.record.plan
    fill = 2 * (max(old.depths) - 1)
    flight_s = fleet.recorded.wall_s * fill / (old.micro_batches / old.replicas + fill)
    cost_s = flight_s + max(sums_s(fleet.job, each, fleet.speeds.link_bytes_per_s) for each in (old, plan))
    return left_s if left_s > _LEAST_LEFT_S and left_s * faster > _CLEARLY * cost_s else None


def _holdings(fleet: Fleet, members: Sequence[str]) -> list[WorkerInventory]:
    """Return what each member says that it holds; nothing, where that may be of a timeline that was given up."""
    doubtful = bool(fleet.history) and fleet.record.rollback and not fleet.formed
    return [
        WorkerInventory()
        if doubtful and not _has_begun(fleet, name)
        else fleet.workers[name].holding or WorkerInventory()
        for name in members
    ]


def _has_begun(fleet: Fleet, name: str) -> bool:
    """Whether a worker has run steps of the newest generation, and so has the state that this one began from."""
    return fleet.workers[name].ran == fleet.generation
