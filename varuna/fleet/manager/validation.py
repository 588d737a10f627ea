"""Checks for what a worker cannot truthfully say, before the state machine believes it. Pure.

Bugs, mixed-up processes and hostile ones look the same from here; the worker is sent away and the run goes on.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath

from varuna.core.messages import Beat, FromWorker, HeldCheckpoint, Saved, StopReport, Vote, Voted
from varuna.core.plan import Copies
from varuna.core.saved import SavedShard
from varuna.core.sharded_optimizer import held_by, holders_of
from varuna.core.sums import HeldSums, InheritedSum, SectionSum, is_within, spans_of, union, without
from varuna.core.vote import VoteLayout
from varuna.fleet.state.causes import Objection
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.run_events import GenerationRecord
from varuna.fleet.state.worker import Worker


def objection(fleet: Fleet, worker: str, message: FromWorker) -> Objection | None:
    """Say why ``message`` cannot be true; None if it can."""
    if fleet.job is None or worker not in fleet.workers:
        return None
    match message:
        case Beat(generation=generation) if generation > fleet.generation:
            return Objection(f"it sent a heartbeat of generation {generation}, the newest is {fleet.generation}")
        case Voted(vote=vote):
            return _about_vote(fleet, vote) or _out_of_line(fleet, worker, [vote])
        case StopReport(generation=generation) if generation >= fleet.generations.began:
            return _about_held(fleet, worker, message)
        case Saved(shard=shard):
            return _about_shard(fleet, worker, shard)
        case _:
            return None


def _about_vote(fleet: Fleet, vote: Vote) -> Objection | None:
    if not 0 <= vote.generation <= fleet.generation:
        return Objection(f"it has a vote of generation {vote.generation}, the newest is {fleet.generation}")
    assert fleet.job is not None
    if (record := fleet.record_of(vote.generation)) is None:
        return None  # of a training that is over
    if not 0 <= vote.step < fleet.job.steps:
        return Objection(f"it has a vote of step {vote.step} of {fleet.job.steps}")
    plan = record.plan
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches, metrics=fleet.job.metrics)
    if vote.is_whole and len(vote.vector) != layout.size:
        return Objection(f"its vote of step {vote.step} has {len(vote.vector)} numbers instead of {layout.size}")
    return None


def _out_of_line(fleet: Fleet, worker: str, votes: Sequence[Vote]) -> Objection | None:
    """Return whether votes that count were not cast by the sender, or follow no step that anybody else knows of.

    A rank votes on a step only if it has applied the one before. Votes may have gone unheard, while a manager was away
    for long: then other ranks are as far, as soon as any of them is heard.
    """
    known = max([fleet.recorded.step, *fleet.recorded.votes])
    for vote in sorted(votes, key=lambda vote: vote.step):
        if vote.generation < fleet.recorded.lineage or vote.step <= known:
            continue  # it changes nothing
        record = fleet.record_of(vote.generation)
        if record is None or not record.has_seat(worker):
            return Objection(f"it has a vote of step {vote.step}, in which it did not take part")
        if vote.step > known + 1:
            others = [fleet.workers[name] for name in record.grid if name != worker and name in fleet.workers]
            heard = [step for each in others if (step := _newest_step(fleet, each)) is not None]
            if heard and max(heard) < vote.step:
                return Objection(f"it has a vote of step {vote.step}, but step {known + 1} is not committed")
        known = vote.step
    return None


def _newest_step(fleet: Fleet, worker: Worker) -> int | None:
    """Return the step that a rank says it does next; None if it has said nothing since the generation began."""
    if worker.holding is not None and worker.holding.next_step is not None:
        return worker.holding.next_step
    beat = worker.beat
    return beat.step if beat is not None and beat.generation == fleet.generation else None


def _about_held(fleet: Fleet, worker: str, held: StopReport) -> Objection | None:
    if held.generation > fleet.generation:
        return Objection(f"it stopped generation {held.generation}, the newest is {fleet.generation}")
    for vote in held.votes:
        if why := _about_vote(fleet, vote):
            return why
    if why := _out_of_line(fleet, worker, held.votes):
        return why
    for each in held.checkpoints:
        if not _was_made(fleet, worker, each):
            return Objection(
                f"it claims to have a memory checkpoint of step {each.step} from generation {each.generation}, which "
                "it cannot have"
            )
    if held.next_step is None:
        claims = held.sections or held.lent or held.copies
        return Objection("it holds sections without a step") if claims else None
    known = max([fleet.recorded.step, *fleet.recorded.votes, *(vote.step for vote in held.votes)])
    if held.next_step > max(known + 1, _furthest_step(fleet)):
        return Objection(f"it claims to hold step {held.next_step}, but step {known + 1} is not committed")
    if not _was_given(fleet, worker, held):
        named = ", ".join(str(section) for section in (*held.sections, *held.lent)[:8])
        return Objection(f"it claims to hold sections {named}, which it was never given")
    if not _was_copied(fleet, worker, held.next_step, held.copies):
        named = ", ".join(str(section) for section in held.copies[:8])
        return Objection(f"it claims to keep copies of sections {named}, which nobody has sent it")
    return objection_to_sums(fleet, worker, held.next_step, held.sums) if held.sums is not None else None


def _furthest_step(fleet: Fleet) -> int:
    """The step that members may have: of the newest generation, or, until that has formed, where those before were."""
    if not fleet.history:
        return 0
    found = fleet.record.first_step
    for record in reversed(fleet.history):
        if record.recovery_seconds is not None:
            break
        found = max(found, record.first_step + (record.steps_redone if record.rollback else 0))
    return found


def objection_to_sums(fleet: Fleet, worker: str, next_step: int, sums: HeldSums) -> Objection | None:
    """Return whether they can be sums at all, and of micro-batches that the worker was given.

    What really is in them is proved by the count in the vote.
    """
    assert fleet.job is not None
    micro_batches = -(-fleet.job.global_batch // sums.micro_batch)
    for parts in (sums.sections, sums.copies):
        named = [each.section for each in parts]
        if len(set(named)) == len(named) and all(is_within(each.micro_batches, micro_batches) for each in parts):
            continue
        return Objection(f"the sums of gradients that it holds are of other micro-batches than {micro_batches}")
    width = 2 + len(fleet.job.metrics)
    if any(not 0 <= each.micro_batch < micro_batches or len(each.values) != width for each in sums.losses):
        return Objection(f"the losses that it holds are not {width} numbers for one of {micro_batches} micro-batches")
    if not any(_may_contain(record, worker, next_step, sums) for record in reversed(fleet.history)):
        return Objection("the sums of gradients that it holds are of sections or micro-batches that it was never given")
    return None


def _may_contain(record: GenerationRecord, worker: str, next_step: int, sums: HeldSums) -> bool:
    """Return whether sums can be of this generation: the worker's own, or those of which it keeps copies."""
    if not record.has_seat(worker) or record.plan.micro_batch != sums.micro_batch:
        return False
    rank = record.ranks[worker]
    owner = record.copied_from(rank)
    own = all(_may_be_of(record, rank, next_step, each) for each in sums.sections)
    return own and all(owner is not None and _may_be_of(record, owner, next_step, each) for each in sums.copies)


def _may_be_of(record: GenerationRecord, rank: int, next_step: int, held: SectionSum) -> bool:
    """Return whether a sum can be a rank's: of its share, of what it went on from, or of all replicas."""
    plan = record.plan
    replica = plan.place_of(rank).replica
    share = spans_of(plan.micro_batches_of(replica))
    taken: tuple[InheritedSum, ...] = ()
    if record.remainder is not None and next_step == record.first_step:
        share, taken = record.remainder.work[replica], record.remainder.taken[rank]
    own = (part.micro_batches for part in taken if part.section == held.section)
    is_full = held.micro_batches == ((0, plan.micro_batches),)
    return held.section in plan.sections_at(rank) and (is_full or not without(held.micro_batches, union([share, *own])))


def _was_given(fleet: Fleet, worker: str, held: StopReport) -> bool:
    """A worker holds what its seat does, of this generation or (if that did not form) of one before.

    Lent sections are missing while their parameters are outdated. In the first step, some of the others may be as if
    they were lent: their optimizer state is on its way.
    """
    if not held.sections and not held.lent:
        return True
    assert fleet.job is not None
    for record in reversed(fleet.history):
        if record.has_seat(worker):
            rank = record.ranks[worker]
            replica = record.plan.place_of(rank).replica
            holders = holders_of(record.plan, fleet.job.model.sections, shared=fleet.job.memory.shard_optimizer)
            sections = record.plan.sections_at(rank)
            whole = held_by(holders, sections, replica)
            lent = tuple(section for section in sections if section not in whole)
            if held.sections == whole and held.lent in ((), lent):
                return True
            missing = set(held.lent) - set(lent)
            is_first = held.next_step == record.first_step
            if is_first and missing.issubset(whole) and held.sections == tuple(s for s in whole if s not in missing):
                return True
    return False


def _was_copied(fleet: Fleet, worker: str, next_step: int, copies: tuple[int, ...]) -> bool:
    """A worker keeps a copy of one other seat's state, of this generation or (if that did not form) of one before.

    In the first step, also what it had before then: others may still get that.
    """
    if not copies:
        return True
    is_first, had = next_step == fleet.record.first_step, set[int]()
    for record in reversed(fleet.history):
        if not record.has_seat(worker):
            continue
        source, has_state = record.copied_from(record.ranks[worker]), record.plan.copies is Copies.STATE
        copied = tuple(record.plan.sections_at(source)) if has_state and source is not None else ()
        had.update(copied, record.plan.sections_at(record.ranks[worker]))
        if copies == copied or (is_first and had.issuperset(copies)):
            return True
    return False


def _was_made(fleet: Fleet, worker: str, held: HeldCheckpoint) -> bool:
    """Return whether a memory checkpoint can be of a seat that the worker had, or of one that it kept."""
    record = fleet.record_of(held.generation)
    if record is None or not record.has_seat(worker):
        return False
    rank = record.ranks[worker]
    owner = record.copied_from(rank)
    can_be = {*record.plan.sections_at(rank), *(() if owner is None else record.plan.sections_at(owner))}
    return held.step >= record.first_step and can_be.issuperset(held.sections)


def _about_shard(fleet: Fleet, worker: str, shard: SavedShard) -> Objection | None:
    """Return whether a worker can have saved this; it may be early: others' votes are still on their way."""
    assert fleet.job is not None
    if shard.generation < fleet.generations.began:
        return None  # of a training that is over
    path = PurePosixPath(shard.file)
    if path.is_absolute() or ".." in path.parts:
        return Objection(f"it saved a shard outside of the checkpoints: {shard.file[:80]}")
    known = 0 <= shard.section < len(fleet.job.model.sections) and 0 <= shard.step <= fleet.job.steps
    if not known or not 0 <= shard.generation <= fleet.generation:
        return Objection(
            f"it saved section {shard.section} at step {shard.step} in generation {shard.generation}, which is "
            "impossible"
        )
    record = fleet.record_of(shard.generation)
    if record is None or not record.has_seat(worker):
        return Objection(f"it saved section {shard.section} in generation {shard.generation}, in which it had no seat")
    if shard.section not in record.plan.sections_at(record.ranks[worker]):
        return Objection(f"it saved section {shard.section}, which it did not have in generation {shard.generation}")
    return None
