"""What the next generation keeps of the step in flight: sums of gradients that outlast a loss. Pure.

Sums are used only for the same step, on top of the same parameters. Where a section moves, they may move with it. A
wrong set costs time, never the run: the vote counts what is in the sums.
"""

from collections.abc import Mapping, Sequence

from varuna.core.messages import Transfer
from varuna.core.plan import Plan
from varuna.core.sums import MicroBatchLoss, Remainder, Spans, count, remainder, spans_of
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.run_events import GenerationRecord
from varuna.fleet.state.worker import Holding


def salvage(
    fleet: Fleet, plan: Plan, members: Sequence[str], moves: Sequence[Transfer], next_step: int
) -> tuple[Remainder | None, tuple[Transfer, ...]]:
    """What is left to do of the step that was broken off (None: all of it); and the moves, some of them with sums.

    Args:
        fleet: all its members stand still.
        plan: of the next generation.
        members: worker of each rank, spares after the grid.
        moves: of sections.
        next_step: that every state contains.
    """
    plain = tuple(moves)
    if not fleet.history or (fleet.record.rollback and not fleet.formed):
        return None, plain  # sums may be of a timeline that was given up
    holdings = _holdings(fleet, members)
    held = [_sums(holding, plan, next_step) for holding in holdings]
    none = {section for each in holdings if each.sums for section in each.sums.without}
    offered: dict[int, dict[int, Spans]] = {section: {} for section in range(plan.sections) if section not in none}
    for rank in range(plan.workers):
        for section in plan.sections_of(plan.place_of(rank).stage):
            if section in held[rank] and section in offered:
                offered[section][rank] = held[rank][section]
    known = spans_of(losses_of(fleet, members, plan))
    where = plan.micro_batches, plan.replicas, plan.workers
    staying = remainder(*where, offered, known)
    for move in moves:
        if move.section in offered and move.section in held[move.source_rank]:
            offered[move.section].setdefault(move.target_rank, held[move.source_rank][move.section])
    moving = remainder(*where, offered, known)
    if moving is None or (staying is not None and staying.kept >= moving.kept):
        return staying, plain
    taken = {(each.section, rank) for rank, sums in enumerate(moving.taken) for each in sums}
    return moving, tuple(
        move.model_copy(update={"sums": True})
        if (move.section, move.target_rank) in taken and move.section not in held[move.target_rank]
        else move
        for move in moves
    )


def _sums(holding: Holding, plan: Plan, next_step: int) -> dict[int, Spans]:
    """By section, what is in the sums of a worker, if they are of this step."""
    sums = holding.sums
    if sums is None or holding.next_step != next_step or sums.micro_batch != plan.micro_batch:
        return {}
    return {each.section: each.micro_batches for each in sums.sections}


def in_whole_replica(fleet: Fleet, name: str) -> bool:
    """Whether all stages of a worker's replica are left, so that their sums have the same micro-batches."""
    if not fleet.history or not fleet.record.has_seat(name):
        return False
    plan = fleet.record.plan
    first = plan.rank_of(plan.place_of(fleet.record.ranks[name]).replica, 0)
    return all(fleet.is_joined(fleet.members[rank]) for rank in range(first, first + plan.stages))


def losses_of(fleet: Fleet, members: Sequence[str], plan: Plan) -> Mapping[int, MicroBatchLoss]:
    """Losses of the step in flight that any of the members knows, by micro-batch."""
    sums = (holding.sums for holding in _holdings(fleet, members))
    known = (each for held in sums if held and held.micro_batch == plan.micro_batch for each in held.losses)
    return {each.micro_batch: each for each in known}


def share_of_step(record: GenerationRecord) -> float:
    """Which share of a whole step's time the first step of a generation takes, if a part of it is kept."""
    plan, left = record.plan, record.remainder
    if left is None:
        return 1.0
    fill = plan.stages - 1  # forwards before the last stage has work, and as many backwards after it has none
    return (max(map(count, left.work)) + fill) / (plan.micro_batches / plan.replicas + fill)


def _holdings(fleet: Fleet, members: Sequence[str]) -> list[Holding]:
    return [fleet.workers[name].holding or Holding() for name in members]
