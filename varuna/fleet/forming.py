"""A new generation: who waits for whom, where state comes from, and the assignments."""

from dataclasses import dataclass, replace

from varuna.core.errors import NoPlanError, VarunaError
from varuna.core.messages import Assign, Assignment, Transfer
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.shares import holders_of
from varuna.fleet import futility, placement
from varuna.fleet.sight import lose_aside, waits_for_return
from varuna.fleet.state import Checkpoint, Fleet, Idle, Running
from varuna.fleet.story import GenerationRecord, GenerationStarted
from varuna.fleet.turn import Turn
from varuna.fleet.worker import Holding


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the state of a generation comes from: its holders, a checkpoint, or neither."""

    next_step: int
    from_holders: bool = False
    checkpoint: Checkpoint | None = None


def form(turn: Turn, phase: Idle) -> None:
    """Start the next generation as soon as its workers, state and plan are there."""
    live = turn.fleet.joined
    if not live:
        _wait(turn, phase, "there are no workers", 1)
    elif turn.fleet.history or not _gathering(turn.fleet, turn.now_s):
        try:
            _try_form(turn, phase, live)
        except VarunaError as error:
            turn.end(error.exit_code, str(error))


def _gathering(fleet: Fleet, now_s: float) -> bool:
    """Whether the first generation still waits for workers that are warming up."""
    joined_s = [fleet.workers[name].joined_s for name in fleet.joined]
    until_s = max(min(joined_s) + fleet.config.gather_s, max(joined_s) + fleet.config.join_grace_s)
    enough = fleet.config.elastic and len(fleet.joined) >= fleet.config.workers and not fleet.is_starting
    return fleet.more_to_come and not enough and now_s < until_s


def _just_joined(fleet: Fleet, now_s: float) -> bool:
    """Whether somebody came within the last moment."""
    return any(now_s < fleet.workers[name].joined_s + fleet.config.join_grace_s for name in fleet.joined)


def _wait(turn: Turn, phase: Idle, complaint: str, exit_code: int) -> None:
    """Go on waiting for starting workers, or end the run if there are none or they take too long."""
    fleet = turn.fleet
    patience_s = fleet.config.wait_s
    if fleet.finish_reason:
        _end_as_asked(turn, complaint)
    elif not fleet.more_to_come:
        causes = f" ({' and '.join(fleet.causes)})" if fleet.causes else ""
        turn.end(exit_code, complaint if exit_code != 1 else f"{complaint} left{causes}, and none are starting")
    elif turn.now_s >= phase.since_s + patience_s:
        turn.end(exit_code, f"{complaint} (waited {patience_s:.0f} s for starting workers)")
    elif phase.complaint != complaint:
        turn.update(phase=replace(phase, complaint=complaint))
        if fleet.history or exit_code != 1:
            bound = f"starting workers, at most {patience_s:.0f} s" if patience_s < float("inf") else "machines to join"
            turn.notice(f"waiting for {bound}: {complaint}")


def _end_as_asked(turn: Turn, complaint: str) -> None:
    """Somebody asked for the end, and the step in flight, behind which it would come, cannot be done."""
    fleet = turn.fleet
    text = f"{fleet.finish_reason}; no step is running, because {complaint}"
    unsaved = fleet.recorded_step + 1 - fleet.saved_step if fleet.history else 0
    if unsaved > 0:
        text += f". {unsaved} steps are in no checkpoint; the same command repeats them"
    turn.end(int(unsaved > 0), text)


def _try_form(turn: Turn, phase: Idle, live: tuple[str, ...]) -> None:
    """Find state and a plan; without either, wait.

    Raises:
        VarunaError: the checkpoints cannot be used.
    """
    fleet, job = turn.fleet, _job(turn)
    if fleet.futile and futility.waits(turn, phase, live):
        if fleet.finish_reason and isinstance(turn.fleet.phase, Idle) and turn.fleet.futile >= futility.MANY:
            _end_as_asked(turn, turn.fleet.phase.complaint)
        return
    holdings = {name: _holding(fleet, name).sections for name in live}
    lost = placement.uncovered(len(job.model.sections), holdings)
    if lost and fleet.history and fleet.more_to_come and _just_joined(fleet, turn.now_s):
        return  # nobody's state is kept waiting: whoever comes in the same moment is taken in too
    if lost and waits_for_return(turn, phase):
        return
    if phase.rejected == live:
        _wait(turn, phase, phase.complaint, 3)
        return
    origin = _restore(turn, job) if lost else _Origin(next_step=fleet.recorded_step + 1, from_holders=True)
    if not fleet.history and origin.checkpoint and job.micro_batch is None:
        turn.update(micro_batch=origin.checkpoint.micro_batch)
    try:
        plan, usable = _plan_and_workers(turn, live)
    except NoPlanError as error:
        turn.update(phase=replace(phase, rejected=live))
        _wait(turn, replace(phase, rejected=live), str(error), 3)
        return
    _start(turn, phase, plan, usable, origin, holdings if origin.from_holders else {})


def _plan_and_workers(turn: Turn, live: tuple[str, ...]) -> tuple[Plan, tuple[str, ...]]:
    """Plan for the workers that should be used; stragglers and those about to leave only if it takes them.

    Raises:
        NoPlanError: nothing fits, whoever is used.
    """
    fleet = turn.fleet
    staying = tuple(name for name in live if not fleet.is_departing(name))
    choices = [fleet.available, staying, live]
    for usable in choices[:-1]:
        if usable and usable != live:
            try:
                return _plan_keeping(turn, len(usable)), usable
            except NoPlanError:
                continue
    return _plan_keeping(turn, len(live)), live


def _plan_keeping(turn: Turn, workers: int) -> Plan:
    """The plan that ran last, if nothing is clearly better: then only seats change hands.

    Raises:
        NoPlanError: nothing fits.
    """
    if _is_best_known(turn.fleet, workers):
        return turn.fleet.record.plan
    plan = plan_for(turn, workers)
    turn.update(planned_for=workers)
    return _clearly_better(turn, plan, workers)


def plan_to_come(turn: Turn, plan: Plan, workers: int) -> Plan:
    """What a morph for these workers would run, if ``plan`` is the best one for them.

    Whoever asks for a morph must know: one that changes nothing would be asked for again and again.
    """
    return turn.fleet.record.plan if _is_best_known(turn.fleet, workers) else _clearly_better(turn, plan, workers)


def _is_best_known(fleet: Fleet, workers: int) -> bool:
    """The plan that ran last was the best one for ``planned_for`` workers: so it is for fewer, if they are enough."""
    return bool(fleet.history) and not fleet.replan and fleet.record.plan.workers <= workers <= fleet.planned_for


def _clearly_better(turn: Turn, plan: Plan, workers: int) -> Plan:
    """``plan``, or the one that ran last if that is about as fast, by what is known now."""
    fleet = turn.fleet
    if not fleet.history or fleet.replan or fleet.record.plan.workers > workers:
        return plan
    old = fleet.record.plan
    if old.replicas == 1 < plan.replicas:  # state that is held twice is worth more than the same seats
        return plan
    return old if plan.step_s >= turn.advice.predicted_s(old) * (1 - fleet.config.min_gain) else plan


def plan_for(turn: Turn, workers: int) -> Plan:
    """Plan with the run's micro-batch; only if nothing fits with it, and the user left m open, with a smaller one.

    Raises:
        NoPlanError: nothing fits.
    """
    job, kept = _job(turn).model_copy(update={"memory_bytes": turn.fleet.memory_bytes}), turn.fleet.micro_batch
    try:
        return turn.advice.plan(job, workers, kept)
    except NoPlanError:
        if kept is None or job.micro_batch is not None:
            raise
        plan = turn.advice.plan(job, workers, None)
        if plan.micro_batch >= kept:
            raise
        return plan


def _restore(turn: Turn, job: JobFacts) -> _Origin:
    """The newest checkpoint, else the beginning."""
    checkpoint = turn.advice.checkpoint(job)
    return _Origin(next_step=checkpoint.step if checkpoint else 0, checkpoint=checkpoint)


def _tell_origin(turn: Turn, origin: _Origin) -> None:
    """Say where the run goes on, if not where it stopped."""
    fleet, checkpoint, next_step = turn.fleet, origin.checkpoint, origin.next_step
    where = f"the checkpoint of step {next_step} in {checkpoint.folder}" if checkpoint else "the beginning"
    if fleet.history and fleet.recorded_step >= next_step:
        turn.notice(
            f"ROLLBACK: the last holder of some state was lost; going back from step {fleet.recorded_step + 1} to "
            f"{where}",
            warning=True,
        )
    elif checkpoint and not fleet.history:
        complete = ", the last one; nothing left to do" * (next_step >= _job(turn).steps)
        turn.notice(f"resuming from {where}{complete}")


def _start(
    turn: Turn, phase: Idle, plan: Plan, usable: tuple[str, ...], origin: _Origin, holdings: placement.Holdings
) -> None:
    """Seat everybody, write it down, then tell them."""
    fleet, job = turn.fleet, _job(turn)
    weights = [section.parameter_bytes + section.optimizer_bytes for section in job.model.sections]
    # Old ranks first, so that among equals rank 0 keeps its worker.
    ordered = sorted(usable, key=lambda name: (name not in fleet.members, fleet.rank_of(name) or 0))
    kept = fleet.record.grid if fleet.history and plan == fleet.record.plan else ()
    holders = holders_of(plan, job.model.sections, shared=job.shard_optimizer)
    lent = {name: _holding(fleet, name).lent for name in holdings}
    nodes = {name: worker.node for name, worker in fleet.workers.items()}
    seated = placement.seat(plan, ordered, holdings, weights, nodes=nodes, kept=kept, lent=lent, holders=holders)
    # Who is left out may still be the source of somebody's state.
    members = (*seated, *(name for name in fleet.joined if name not in seated))
    moves = (
        placement.transfers(plan, members, holdings, weights, lent=lent, holders=holders) if origin.from_holders else ()
    )
    rollback = not origin.from_holders
    if rollback:
        _tell_origin(turn, origin)
    undone = fleet.recorded_step + 1 - origin.next_step if rollback and fleet.history else 0
    record = GenerationRecord(
        generation=fleet.generation + 1,
        plan=plan,
        members=members,
        cause=" and ".join(fleet.causes) or "start",
        first_step=origin.next_step,
        steps_redone=max(0, undone) + phase.in_flight,
        moved_sections=len(moves),
        rollback=rollback,
        checkpoint=origin.checkpoint.folder if origin.checkpoint else None,
    )
    _keep_micro_batch(turn, plan)
    lose_aside(turn)
    turn.update(
        phase=Running(began_s=fleet.listened_s),
        history=(*fleet.history, record),
        workers={name: replace(worker, holding=None) for name, worker in turn.fleet.workers.items()},
        departed=frozenset(),
        causes=(),
        broke_s=phase.since_s if not fleet.history else fleet.broke_s,
        planned=fleet.planned and phase.in_flight == 0,
        morph_asked=False,
        replan=False,
        foreseen={},
        recorded_step=origin.next_step - 1,
        **({"lineage": record.generation, "votes": {}} if rollback else {}),
    )
    turn.publish(GenerationStarted(record=record))
    _assign(turn, record, moves)


def _assign(turn: Turn, record: GenerationRecord, moves: tuple[Transfer, ...]) -> None:
    """Tell each member its rank."""
    secret = turn.advice.secret()
    for rank, name in enumerate(record.members):
        assignment = Assignment(
            generation=record.generation,
            plan=record.plan,
            rank=rank,
            members=record.members,
            next_step=record.first_step,
            transfers=moves,
            checkpoint=record.checkpoint,
            fresh=record.rollback and record.checkpoint is None,
            secret=secret,
        )
        turn.send(name, Assign(assignment=assignment))


def _keep_micro_batch(turn: Turn, plan: Plan) -> None:
    """The micro-batch size belongs to the run; say so when it has to change."""
    kept = turn.fleet.micro_batch
    if kept is not None and plan.micro_batch != kept:
        turn.notice(f"no plan fits with micro-batches of {kept}; using {plan.micro_batch} from now on", warning=True)
    turn.update(micro_batch=plan.micro_batch)


def _holding(fleet: Fleet, name: str) -> Holding:
    """What a worker holds; nothing, if it has just come."""
    return fleet.workers[name].holding or Holding()


def _job(turn: Turn) -> JobFacts:
    """The run's job, known once a worker has joined."""
    assert turn.fleet.job is not None
    return turn.fleet.job
