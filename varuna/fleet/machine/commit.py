"""Votes, and the end of a generation: everybody stops, and one verdict on the step in flight binds all."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from varuna.core.messages import Apply, Held, Hold, Recorded, Suspect, Vote
from varuna.core.vote import VoteLayout
from varuna.fleet.machine.backoff import note_broken
from varuna.fleet.machine.leases import is_near, note_progress, stands_still, waits_for_return
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import EndCause, Ending
from varuna.fleet.state.fleet import Ended, Fleet, Idle, Running, Stopping, Suspicion
from varuna.fleet.state.run_events import Morphed, StepRecorded, VerdictReached
from varuna.fleet.state.worker import Holding


def note_held(turn: Transition, name: str, held: Held) -> None:
    """Note what a member that has stopped holds; its votes are known from now on, even if it dies."""
    fleet = turn.fleet
    if held.generation != fleet.generation or not fleet.is_member(name):
        return
    if not isinstance(fleet.phase, Running | Stopping):
        return
    turn.update(votes=_with(fleet.votes, (vote for vote in held.votes if _counts(fleet, vote))))
    if isinstance(fleet.phase, Stopping) and name in fleet.phase.applying:
        if held.next_step is not None and held.next_step < _newest_step(turn.fleet):
            return  # answered a Hold that crossed our Apply
        turn.update(phase=replace(fleet.phase, applying=fleet.phase.applying - {name}))
    turn.update_worker(name, holding=Holding(held.next_step, frozenset(held.sections), frozenset(held.lent)))
    if isinstance(fleet.phase, Running) and fleet.phase.stopped is None and fleet.is_joined(name):
        turn.update(phase=replace(fleet.phase, stopped=name))


def note_voted(turn: Transition, name: str, vote: Vote) -> None:
    """Note that a step is committed."""
    fleet = turn.fleet
    if not fleet.is_member(name) or vote.generation != fleet.generation or not _counts(fleet, vote):
        return
    turn.update(votes=_with(fleet.votes, [vote]))
    if not isinstance(fleet.phase, Stopping):  # there, Held may still bring older votes: settle keeps the order
        record_votes(turn)


def note_suspect(turn: Transition, name: str, suspect: Suspect) -> None:
    """Note evidence that a peer is gone; or, after a regroup vote, that it left before this one had its result."""
    fleet = turn.fleet
    if suspect.generation != fleet.generation or not fleet.is_member(name) or not fleet.is_joined(name):
        return
    if isinstance(fleet.phase, Running) and fleet.phase.suspicion is None:
        turn.update(phase=replace(fleet.phase, suspicion=Suspicion(turn.now_s, name, suspect.reason)))
        turn.look_at_all()
    elif isinstance(fleet.phase, Stopping) and fleet.phase.planned and fleet.workers[name].holding is None:
        turn.send(name, Hold(generation=fleet.generation))  # it does not stop by itself any more


def _counts(fleet: Fleet, vote: Vote) -> bool:
    """Whether a vote belongs to this timeline and still matters."""
    return fleet.lineage <= vote.generation <= fleet.generation and vote.step > fleet.recorded_step


def _with(known: Mapping[int, Vote], votes: Iterable[Vote]) -> dict[int, Vote]:
    """Add votes: the first one on a step stays, but a whole vote replaces totals."""
    both = dict(known)
    for vote in votes:
        if vote.step not in both or (vote.is_whole and not both[vote.step].is_whole):
            both[vote.step] = vote
    return both


def record_votes(turn: Transition) -> None:
    """Record the votes that are known and not recorded, in step order; keep the newest for a verdict."""
    before = turn.fleet.recorded_step
    for step in sorted(turn.fleet.votes):
        if step > turn.fleet.recorded_step and not isinstance(turn.fleet.phase, Ended):
            _record(turn, turn.fleet.votes[step])
    fleet = turn.fleet
    if fleet.recorded_step > before:
        turn.update(votes={fleet.recorded_step: fleet.votes[fleet.recorded_step]})
        for name in fleet.live_members:
            if is_near(fleet, fleet.workers[name]):  # to whom nobody listens, messages would pile up
                turn.send(name, Recorded(step=fleet.recorded_step))


def _record(turn: Transition, vote: Vote) -> None:
    """Record one step; the first one of a generation ends its morph."""
    fleet = turn.fleet
    assert fleet.job is not None
    plan = fleet.history[vote.generation].plan
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches, metrics=fleet.job.metrics)
    try:
        tally = layout.tally(vote.vector) if vote.is_whole else vote.tally
    except ValueError as error:
        turn.end(
            1, f"the vote of step {vote.step} cannot be read: {error}. Do all machines run the same version of Varuna?"
        )
        return
    every_s = turn.now_s - fleet.recorded_s if fleet.formed and vote.generation == fleet.generation else vote.wall_s
    assert tally is not None
    turn.update(
        recorded_step=vote.step,
        recorded_s=turn.now_s,
        step_wall_s=vote.wall_s,
        step_every_s=every_s,
        start_failures=0,
        futile=0,
        futile_since_s=None,
    )
    turn.publish(
        StepRecorded(
            step=vote.step,
            generation=vote.generation,
            loss=tally.loss,
            weight=tally.weight,
            counted=tally.counted,
            examples_per_s=plan.global_batch / vote.wall_s if vote.wall_s > 0 else 0.0,
            plan=plan,
        )
    )
    if vote.generation == fleet.generation:
        note_progress(turn)
    if vote.generation == fleet.generation and not fleet.formed:
        _note_formed(turn, vote)
        _note_proven(turn)


def _note_formed(turn: Transition, vote: Vote) -> None:
    """Note that the newest generation trains."""
    fleet = turn.fleet
    if fleet.planned:
        stall_s = max(0.0, turn.now_s - fleet.broke_s - vote.wall_s)
        turn.update(experience=fleet.experience.stalled(stall_s), planned=False)
    record = fleet.record.model_copy(update={"recovery_seconds": max(0.0, turn.now_s - fleet.broke_s)})
    turn.update(history=(*fleet.history[:-1], record))
    if record.generation:
        turn.publish(Morphed(record=record, old_plan=fleet.history[-2].plan))


def _note_proven(turn: Transition) -> None:
    """Note that members have trained: if one is lost now, that is not counted as a failed start."""
    for name, worker in turn.fleet.workers.items():
        if worker.replacement and worker.seated:
            turn.update_worker(name, replacement=False)


def watch_generation(turn: Transition, phase: Running) -> None:
    """End the generation if a member is lost, a suspicion stands, or somebody stopped."""
    fleet = turn.fleet
    if any(cause.took_somebody for cause in fleet.causes):
        stop_generation(turn)
    elif phase.stopped is not None and phase.regroup is not None:
        stop_generation(turn, phase.regroup, planned=True)
    elif phase.stopped is not None:
        stop_generation(turn, EndCause(Ending.STOPPED, f"worker {phase.stopped} stopped"))
    elif not fleet.formed and fleet.listened_s >= phase.began_s + fleet.config.form_timeout_s and _copying(fleet):
        stop_generation(turn, EndCause(Ending.UNREADY, f"{' and '.join(_copying(fleet))} did not get ready in time"))
    elif turn.is_tick and fleet.is_leaving and stands_still(fleet, phase):
        # Such as in a generation that began after the last step.
        stop_generation(turn, EndCause(Ending.LEFT, "the other ranks have left"))
    elif phase.suspicion and turn.now_s >= phase.suspicion.at_s + fleet.config.suspect_grace_s:
        stop_generation(
            turn, EndCause(Ending.REPORTED, f"worker {phase.suspicion.worker} reported: {phase.suspicion.reason}")
        )


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


def stop_generation(turn: Transition, cause: EndCause | None = None, *, planned: bool = False) -> None:
    """End the generation. After a regroup vote its ranks stop by themselves, so Hold is sent only to late ones.

    Spares took no part in that vote, and a rank whose link broke does not have its result: they are told at once.
    """
    fleet = turn.fleet
    suspicion = fleet.phase.suspicion if isinstance(fleet.phase, Running) else None
    note_broken(turn)
    if planned:
        for name in fleet.live_members:
            if not fleet.record.has_seat(name) or (suspicion is not None and suspicion.worker == name):
                turn.send(name, Hold(generation=fleet.generation))
    patient = planned and len(fleet.live_members) == len(fleet.members)
    hold_at_s = turn.now_s + (fleet.config.suspect_grace_s if patient else 0.0)
    turn.update(
        phase=Stopping(
            planned=planned,
            deadline_s=fleet.listened_s + fleet.config.hold_timeout_s,
            hold_at_s=hold_at_s,
            suspicion=suspicion,
        ),
        causes=(*fleet.causes, cause) if cause is not None else fleet.causes,
        broke_s=turn.now_s,
        planned=planned,
    )


def settle(turn: Transition, phase: Stopping) -> None:
    """Once all survivors have answered: the verdict, and when all have applied it, the end of the generation."""
    fleet = turn.fleet
    if fleet.workers.awaited:
        press(turn, phase)
        if fleet.listened_s >= phase.deadline_s:
            for name in _awaited(fleet):
                turn.lose(name, f"did not stop within {fleet.config.hold_timeout_s:.0f} s", kill=True)
        return
    if waits_for_return(turn, phase):
        return
    record_votes(turn)
    if turn.fleet.phase is not phase:
        return  # a vote could not be read
    vote, laggards = judge(turn, turn.fleet.live_members)
    if vote is not None and laggards:
        commit(turn, phase, vote, laggards)
        return
    in_flight = 0 if phase.planned or phase.committed else 1
    turn.update(phase=Idle(since_s=turn.now_s, in_flight=in_flight))


def _awaited(fleet: Fleet) -> list[str]:
    """Members that have not answered, by rank."""
    return [name for name in fleet.live_members if fleet.workers[name].holding is None]


def press(turn: Transition, phase: Stopping) -> None:
    """Send Hold, once, to members that do not know that the generation is over."""
    fleet = turn.fleet
    if phase.hold_at_s is not None and turn.now_s >= phase.hold_at_s:
        for name in _awaited(fleet):
            turn.send(name, Hold(generation=fleet.generation))
        turn.update(phase=replace(phase, hold_at_s=None))


def judge(turn: Transition, answered: Iterable[str]) -> tuple[Vote | None, tuple[str, ...]]:
    """The newest vote, and which members that have answered must apply it; state that no vote explains is discarded.

    A state is that of the newest step if it is where the generation began, or after the newest vote. One step
    earlier, a rank of the grid still holds its reduced gradients. Whatever else turns up belongs to a timeline
    that a rollback abandoned, or to a spare that has not followed.
    """
    fleet = turn.fleet
    newest = _newest_step(fleet)
    vote = fleet.votes.get(newest - 1)
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
                turn.notice(
                    f"the state of worker {name} at step {holding.next_step} differs from that of step {newest}"
                )
            turn.update_worker(name, holding=Holding())
    return vote, tuple(laggards)


def _newest_step(fleet: Fleet) -> int:
    """Steps that are committed: what every state must contain."""
    return max(fleet.record.first_step, *(step + 1 for step in fleet.votes), fleet.recorded_step + 1)


def commit(turn: Transition, phase: Stopping, vote: Vote, laggards: tuple[str, ...]) -> None:
    """COMMIT: on disk first, then to the laggards, who answer Held again."""
    fleet = turn.fleet
    turn.publish(VerdictReached(generation=fleet.generation, vote=vote, laggards=laggards))
    for name in laggards:
        turn.send(name, Apply(generation=fleet.generation, vote=vote))
        turn.update_worker(name, holding=None)
    turn.update(
        phase=replace(
            phase,
            deadline_s=fleet.listened_s + fleet.config.hold_timeout_s,
            hold_at_s=None,
            applying=phase.applying | frozenset(laggards),
            committed=True,
        )
    )
