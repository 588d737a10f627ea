"""Votes, and the end of a generation: everybody stops, and one verdict on the step in flight binds all.

Running    watch_generation: a member is lost, a suspicion stands, or all stopped for a planned morph
   │       stop_generation
Stopping   send_holds, to members that do not know; each answers with a StopReport (note_held)
   │       resolve_stop, once all that live have answered
   ├─ COMMIT: the newest vote is known, and ranks lack its update: written down, then Apply to these laggards,
   │          who answer again
   └─ else Idle: the step in flight, if there is one, runs again
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from varuna.core.messages import Apply, Hold, Recorded, StopReport, Suspect, Vote
from varuna.core.saved import SavedShard
from varuna.core.vote import VoteLayout
from varuna.fleet.machine.backoff import note_broken
from varuna.fleet.machine.device_faults import note_full
from varuna.fleet.machine.leases import awaits_return, forget_waits, is_near, note_progress, stands_still
from varuna.fleet.machine.salvage import share_of_step
from varuna.fleet.machine.silent_links import forget_links, lose_parted_machines, note_unreachable
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import EndCause, Ending
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.morph_gain import FirstStep
from varuna.fleet.state.outputs import Collect
from varuna.fleet.state.phases import Ended, Idle, Running, Stopping, Suspicion
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.run_events import GenerationRecord, Morphed, StepRecorded, VerdictReached
from varuna.fleet.state.worker import WorkerInventory, changed

_MOST_EARLY = 4096
"""Shards that wait for votes; of more than that the latest steps are forgotten."""


def _note(transition: Transition, **changes: Any) -> None:
    """Replace fields of the record."""
    transition.update(recorded=changed(transition.fleet.recorded, **changes))


def note_checkpoint(transition: Transition, step: int) -> None:
    """Note that a checkpoint with so many steps was committed."""
    _note(transition, saved_step=step)


def begin_recording(fleet: Fleet, record: GenerationRecord, checkpoint: Checkpoint | None) -> RecordedSteps:
    """Return the record with which a new generation begins; a rollback forgets what came after."""
    abandoned = {"lineage": record.generation, "votes": {}, "early_shards": ()} if record.rollback else {}
    saved_step = fleet.recorded.saved_step if checkpoint is None else checkpoint.step
    return changed(fleet.recorded, step=record.first_step - 1, saved_step=saved_step, **abandoned)


def note_held(transition: Transition, name: str, held: StopReport) -> None:
    """Note what a member that has stopped holds; its votes are known from now on, even if it dies."""
    fleet = transition.fleet
    if held.generation != fleet.generation or not fleet.is_member(name):
        return
    if not isinstance(fleet.phase, Running | Stopping):
        return
    _note(transition, votes=_with(fleet.recorded.votes, (vote for vote in held.votes if _counts(fleet, vote))))
    if isinstance(fleet.phase, Stopping) and name in fleet.phase.applying:
        if held.next_step is not None and held.next_step < _newest_step(transition.fleet):
            return  # answered a Hold that crossed our Apply
        transition.update(phase=replace(fleet.phase, applying=fleet.phase.applying - {name}))
    sections = frozenset((*held.sections, *held.copies))
    lent = frozenset(held.lent)
    holding = WorkerInventory(held.next_step, sections, lent, held.sums, held.wrong_sums, held.checkpoints)
    transition.update_worker(name, holding=holding)
    if isinstance(fleet.phase, Running) and fleet.phase.stopped is None and fleet.is_joined(name):
        transition.update(phase=replace(fleet.phase, stopped=name))


def note_voted(transition: Transition, name: str, vote: Vote) -> None:
    """Note that a step is committed."""
    fleet = transition.fleet
    if not fleet.is_member(name) or vote.generation != fleet.generation or not _counts(fleet, vote):
        return
    _note(transition, votes=_with(fleet.recorded.votes, [vote]))
    if not isinstance(fleet.phase, Stopping):  # there, Held may still bring older votes: settle keeps the order
        record_votes(transition)


def note_saved(transition: Transition, shard: SavedShard) -> None:
    """Note a durable shard: it counts once the step before it is recorded, whatever its sender says of the future."""
    fleet = transition.fleet
    if shard.generation < fleet.generations.began:
        return  # of a training that is over
    if shard.step <= fleet.recorded.step + 1:
        transition.instructions.append(Collect(shard))
    else:
        early = sorted((*fleet.recorded.early_shards, shard), key=lambda each: each.step)
        _note(transition, early_shards=tuple(early[:_MOST_EARLY]))


def note_suspect(transition: Transition, name: str, suspect: Suspect) -> None:
    """Note evidence that a peer is gone; or, after a regroup vote, that it left before this one had its result."""
    fleet = transition.fleet
    if suspect.generation != fleet.generation or not fleet.is_member(name) or not fleet.is_joined(name):
        return
    if suspect.fault is not None:
        note_full(transition, name, suspect.fault)
    if suspect.peer is not None:
        note_unreachable(transition, name, suspect.peer)
    phase = transition.fleet.phase
    if isinstance(phase, Running) and phase.suspicion is None:
        at_s = transition.now_s if suspect.fault is None else float("-inf")  # nobody is to be found out
        transition.update(phase=replace(phase, suspicion=Suspicion(at_s, name, suspect.reason)))
        transition.look_at_all()
    elif isinstance(phase, Stopping) and phase.planned and fleet.workers[name].holding is None:
        transition.send(name, Hold(generation=fleet.generation))  # it does not stop by itself any more


def _counts(fleet: Fleet, vote: Vote) -> bool:
    """Return whether a vote belongs to this timeline and still matters."""
    return fleet.recorded.lineage <= vote.generation <= fleet.generation and vote.step > fleet.recorded.step


def _with(known: Mapping[int, Vote], votes: Iterable[Vote]) -> dict[int, Vote]:
    """Add votes: the first one on a step stays, but a whole vote replaces totals."""
    both = dict(known)
    for vote in votes:
        if vote.step not in both or (vote.is_whole and not both[vote.step].is_whole):
            both[vote.step] = vote
    return both


def record_votes(transition: Transition) -> None:
    """Record the votes that are known and not recorded, in step order; keep the newest for a verdict."""
    before = transition.fleet.recorded.step
    for step in sorted(transition.fleet.recorded.votes):
        if step > transition.fleet.recorded.step and not isinstance(transition.fleet.phase, Ended):
            _record(transition, transition.fleet.recorded.votes[step])
    fleet, recorded = transition.fleet, transition.fleet.recorded
    if recorded.step > before:
        due = [shard for shard in recorded.early_shards if shard.step <= recorded.step + 1]
        transition.instructions.extend(map(Collect, due))
        left, newest = recorded.early_shards[len(due) :], {recorded.step: recorded.votes[recorded.step]}
        _note(transition, early_shards=left, votes=newest)
        for name in fleet.live_members:
            if is_near(fleet, fleet.workers[name]):  # to whom nobody listens, messages would pile up
                transition.send(name, Recorded(step=recorded.step))


def _record(transition: Transition, vote: Vote) -> None:
    """Record one step; the first one of a generation ends its morph."""
    fleet = transition.fleet
    assert fleet.job is not None
    record = fleet.record_of(vote.generation)
    assert record is not None  # votes of other trainings do not count
    plan = record.plan
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches, metrics=fleet.job.metrics)
    try:
        tally = layout.tally(vote.vector) if vote.is_whole else vote.tally
    except ValueError as error:
        transition.end_run(
            1, f"the vote of step {vote.step} cannot be read: {error}. Do all machines run the same version of Varuna?"
        )
        return
    every_s = (
        transition.now_s - fleet.recorded.at_s if fleet.formed and vote.generation == fleet.generation else vote.wall_s
    )
    assert tally is not None
    whole_s = vote.wall_s / share_of_step(record)
    _note(transition, step=vote.step, at_s=transition.now_s, wall_s=whole_s, every_s=every_s)
    transition.update(
        starts=transition.fleet.starts.succeeded(), generations=transition.fleet.generations.with_progress()
    )
    transition.publish(
        StepRecorded(
            step=vote.step,
            generation=vote.generation,
            loss=tally.loss,
            weight=tally.weight,
            counted=tally.counted,
            examples_per_s=plan.global_batch / whole_s if vote.wall_s > 0 else 0.0,
            plan=plan,
            training=fleet.training,
        )
    )
    if vote.generation == fleet.generation:
        note_progress(transition)
        forget_waits(transition)
        if fleet.formed and fleet.generations.first_step is not None:
            stall_s = fleet.generations.first_step.stall_s(vote.wall_s)
            transition.update(experience=fleet.experience.corrected(stall_s))
            _note_first_step(transition, None)
    if vote.generation == fleet.generation and not fleet.formed:
        _note_formed(transition, vote)
        _note_proven(transition)


def _note_formed(transition: Transition, vote: Vote) -> None:
    """Note that the newest generation trains."""
    forget_links(transition)
    fleet = transition.fleet
    first_step = None
    if fleet.generations.planned:
        first_step = FirstStep(transition.now_s - fleet.generations.broke_s, share_of_step(fleet.record))
        stall_s = first_step.stall_s(vote.wall_s / first_step.share)
        transition.update(experience=fleet.experience.stalled(stall_s))
    _note_first_step(transition, first_step)
    record = fleet.record.model_copy(
        update={"recovery_seconds": max(0.0, transition.now_s - fleet.generations.broke_s), "remainder": None}
    )
    transition.update(generations=transition.fleet.generations.with_record(record))
    if record.generation > record.began:
        transition.publish(Morphed(record=record, old_plan=fleet.history[-2].plan))


def _note_first_step(transition: Transition, first_step: FirstStep | None) -> None:
    """Note which step, if any, says how long the morph before it took; the next one is none of a planned morph."""
    generations = transition.fleet.generations
    transition.update(generations=changed(generations, first_step=first_step, planned=False))


def _note_proven(transition: Transition) -> None:
    """Note that members have trained: if one is lost now, that is not counted as a failed start."""
    for name, worker in transition.fleet.workers.items():
        if worker.replacement and worker.seated:
            transition.update_worker(name, replacement=False)


def watch_generation(transition: Transition, phase: Running) -> None:
    """End the generation if a member is lost, a suspicion stands, or somebody stopped."""
    fleet = transition.fleet
    if any(cause.took_somebody for cause in fleet.generations.causes):
        stop_generation(transition)
    elif phase.stopped is not None and phase.regroup is not None:
        stop_generation(transition, phase.regroup, planned=True)
    elif phase.stopped is not None:
        stop_generation(transition, EndCause(Ending.STOPPED, f"worker {phase.stopped} stopped"))
    elif not fleet.formed and fleet.listened_s >= phase.began_s + fleet.config.form_timeout_s and _copying(fleet):
        stop_generation(
            transition, EndCause(Ending.UNREADY, f"{' and '.join(_copying(fleet))} did not get ready in time")
        )
    elif transition.is_tick and fleet.is_leaving and stands_still(fleet, phase):
        # Such as in a generation that began after the last step.
        stop_generation(transition, EndCause(Ending.LEFT, "the other ranks have left"))
    elif phase.suspicion and transition.now_s >= phase.suspicion.at_s + fleet.config.suspect_grace_s:
        reported = EndCause(Ending.REPORTED, f"worker {phase.suspicion.worker} reported: {phase.suspicion.reason}")
        lose_parted_machines(transition)
        stop_generation(transition, reported)


def _copying(fleet: Fleet) -> list[str]:
    """Members whose beats say that they are still getting ready for this generation, and wait for others.

    Nobody, while one of them builds a model or reads a checkpoint: that takes as long as it takes.
    """
    found = []
    for name in fleet.live_members:
        beat = fleet.workers[name].beat
        if beat is not None and beat.phase.is_forming:
            if beat.at_work:
                return []
            found.append(name)
    return found


def stop_generation(transition: Transition, cause: EndCause | None = None, *, planned: bool = False) -> None:
    """End the generation. After a regroup vote its ranks stop by themselves, so Hold is sent only to late ones.

    Spares took no part in that vote, and a rank whose link broke does not have its result: they are told at once.
    """
    fleet = transition.fleet
    suspicion = fleet.phase.suspicion if isinstance(fleet.phase, Running) else None
    note_broken(transition)
    if planned:
        for name in fleet.live_members:
            if not fleet.record.has_seat(name) or (suspicion is not None and suspicion.worker == name):
                transition.send(name, Hold(generation=fleet.generation))
    patient = planned and len(fleet.live_members) == len(fleet.members)
    hold_at_s = transition.now_s + (fleet.config.suspect_grace_s if patient else 0.0)
    generations = transition.fleet.generations if cause is None else transition.fleet.generations.with_cause(cause)
    transition.update(
        phase=Stopping(
            planned=planned,
            deadline_s=fleet.listened_s + fleet.config.hold_timeout_s,
            hold_at_s=hold_at_s,
            suspicion=suspicion,
        ),
        generations=generations.stopping(transition.now_s, planned=planned),
    )


def resolve_stop(transition: Transition, phase: Stopping) -> None:
    """Reach the verdict once all survivors have answered; end the generation when all have applied it."""
    fleet = transition.fleet
    if fleet.workers.awaited:
        send_holds(transition, phase)
        if fleet.listened_s >= phase.deadline_s:
            for name in _awaited(fleet):
                transition.lose_worker(name, f"did not stop within {fleet.config.hold_timeout_s:.0f} s", kill=True)
        return
    if awaits_return(transition, phase):
        return
    record_votes(transition)
    if transition.fleet.phase is not phase:
        return  # a vote could not be read
    vote, laggards = choose_verdict(transition, transition.fleet.live_members)
    if vote is not None and laggards:
        commit(transition, phase, vote, laggards)
        return
    in_flight = 0 if phase.planned or phase.committed else 1
    losses = transition.fleet.loss_rate
    per_hour = losses.to_plan_for(transition.now_s)
    if per_hour != losses.planned_per_hour:
        transition.notice(f"plans are chosen for {per_hour:.2g} losses of workers per hour, as this run has seen them")
    transition.update(
        phase=Idle(since_s=transition.now_s, in_flight=in_flight),
        loss_rate=replace(losses, planned_per_hour=per_hour),
    )


def _awaited(fleet: Fleet) -> list[str]:
    """Members that have not answered, by rank."""
    return [name for name in fleet.live_members if fleet.workers[name].holding is None]


def send_holds(transition: Transition, phase: Stopping) -> None:
    """Send Hold, once, to members that do not know that the generation is over."""
    fleet = transition.fleet
    if phase.hold_at_s is not None and transition.now_s >= phase.hold_at_s:
        for name in _awaited(fleet):
            transition.send(name, Hold(generation=fleet.generation))
        transition.update(phase=replace(phase, hold_at_s=None))


def choose_verdict(transition: Transition, answered: Iterable[str]) -> tuple[Vote | None, tuple[str, ...]]:
    """The newest vote, and which members that have answered must apply it; state that no vote explains is discarded.

    A state is that of the newest step if it is where the generation began, or after the newest vote. One step
    earlier, a rank of the grid still holds its reduced gradients. Whatever else turns up belongs to a timeline
    that a rollback abandoned, or to a spare that has not followed.
    """
    fleet = transition.fleet
    newest = _newest_step(fleet)
    vote = fleet.recorded.votes.get(newest - 1)
    laggards = []
    for name in answered:
        holding = fleet.workers[name].holding
        assert holding is not None
        in_grid = fleet.record.has_seat(name)
        may_apply = vote is not None and vote.is_whole and vote.generation == fleet.generation
        if holding.next_step == newest - 1 and in_grid and may_apply:
            laggards.append(name)
        elif holding.next_step != newest or (not in_grid and fleet.record.rollback):
            if holding.next_step is not None and in_grid:
                transition.notice(
                    f"the state of worker {name} at step {holding.next_step} differs from that of step {newest}"
                )
            transition.update_worker(name, holding=WorkerInventory(checkpoints=holding.checkpoints))
    return vote, tuple(laggards)


def _newest_step(fleet: Fleet) -> int:
    """Steps that are committed: what every state must contain."""
    return max(fleet.record.first_step, *(step + 1 for step in fleet.recorded.votes), fleet.recorded.step + 1)


def commit(transition: Transition, phase: Stopping, vote: Vote, laggards: tuple[str, ...]) -> None:
    """COMMIT: on disk first, then to the laggards, who answer Held again."""
    fleet = transition.fleet
    transition.publish(VerdictReached(generation=fleet.generation, vote=vote, laggards=laggards))
    for name in laggards:
        transition.send(name, Apply(generation=fleet.generation, vote=vote))
        transition.update_worker(name, holding=None)
    transition.update(
        phase=replace(
            phase,
            deadline_s=fleet.listened_s + fleet.config.hold_timeout_s,
            hold_at_s=None,
            applying=phase.applying | frozenset(laggards),
            committed=True,
        )
    )
