"""A new generation: its workers, where state comes from, and the assignments.

    who is there ── has each section a holder? ── yes ──> the state of now
                           │ no: wait for its return, else
                           └─ _restore: in memory, in the store, or the beginning
    plan_and_workers ──> _start: seats ─> transfers ─> sums that are kept ─> GenerationRecord ─> Assign to each member

Questions (the newest checkpoint, the best plan) are asked of the shell: a try without an answer ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from varuna.core.dealing import shares_text
from varuna.core.devices import region_of_zone
from varuna.core.errors import NoPlanError
from varuna.core.messages import Assign, Assignment, Transfer
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sharded_optimizer import holders_of
from varuna.core.sums import MicroBatchLoss, remainder_of_stored
from varuna.fleet.machine import backoff, placement
from varuna.fleet.machine.choosing import plan_and_workers
from varuna.fleet.machine.commit import begin_recording
from varuna.fleet.machine.copy_holders import copy_holders
from varuna.fleet.machine.leases import awaits_return, begin_progress, drop_unreachable
from varuna.fleet.machine.recall import in_memory, still_needed
from varuna.fleet.machine.salvage import is_in_whole_replica, losses_of, salvage, sums_moved
from varuna.fleet.machine.standstill import because
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import Blocked, Obstacle, Rejected
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Idle, Running
from varuna.fleet.state.questions import (
    Checkpoint,
    FoundCheckpoint,
    UnansweredError,
    WhichCheckpoint,
)
from varuna.fleet.state.run_events import GenerationRecord, GenerationStarted
from varuna.fleet.state.worker import WorkerInventory, WorkerStatus, changed


@dataclass(frozen=True, slots=True)
class _Origin:
    """The origin of a generation's state: workers that hold it, a checkpoint in a store, or neither."""

    next_step: int
    holdings: placement.Holdings | None = None
    in_memory: bool = False
    """They hold it of an older step."""
    checkpoint: Checkpoint | None = None

    @property
    def goes_back(self) -> bool:
        """Whether steps that are done may have to run again."""
        return self.holdings is None or self.in_memory


def start_generation(transition: Transition, phase: Idle) -> None:
    """Start the next generation as soon as its workers, state and plan are there."""
    if not _joined(transition.fleet):
        is_coming = transition.fleet.is_starting or (
            transition.fleet.more_to_come and not transition.fleet.config.elastic
        )
        text = "no worker is ready yet" if is_coming else "there are no workers"
        _wait(transition, phase, Blocked(Obstacle.NO_WORKERS, text))
    elif transition.fleet.history or not _gathering(transition, phase):
        try:
            _try_form(transition, phase, transition.fleet.joined)
        except UnansweredError:
            _wait_for_store(transition, phase)


def _gathering(transition: Transition, phase: Idle) -> bool:
    """Return whether the first generation still waits for workers that are warming up."""
    fleet = transition.fleet
    enough = fleet.config.elastic and _joined(fleet) >= fleet.config.workers and not fleet.is_starting
    if not fleet.more_to_come or enough:
        return False
    if transition.now_s >= phase.gathers_until_s:  # whoever joins or is lost meanwhile can only make it later
        joined_s = [fleet.workers[name].joined_s for name in fleet.joined]
        until_s = max(min(joined_s) + fleet.config.gather_s, max(joined_s) + fleet.config.join_grace_s)
        transition.update(phase=replace(phase, gathers_until_s=until_s))
        return transition.now_s < until_s
    return True


def _joined(fleet: Fleet) -> int:
    return fleet.workers.count(WorkerStatus.JOINED)


def _just_joined(fleet: Fleet, now_s: float) -> bool:
    """Return whether a worker joined a moment ago."""
    return any(now_s < fleet.workers[name].joined_s + fleet.config.join_grace_s for name in fleet.joined)


def _wait(transition: Transition, phase: Idle, blocked: Blocked) -> None:
    """Go on waiting for starting workers, or end the run if there are none or they take too long."""
    fleet = transition.fleet
    patience_s, no_plan = fleet.config.wait_s, blocked.by is Obstacle.NO_PLAN
    exit_code = NoPlanError.exit_code if no_plan else 1
    if fleet.requests.finish is not None:
        _end_as_asked(transition, fleet.requests.finish, blocked)
    elif not (fleet.more_to_come or (fleet.config.replace and fleet.resting)):
        text = f"{blocked.text} left{because(fleet)}, and none are starting"
        transition.end_run(exit_code, blocked.text if no_plan else text)
    elif transition.now_s >= phase.since_s + patience_s:
        transition.end_run(exit_code, f"{blocked.text} (waited {patience_s:.0f} s for starting workers)")
    elif phase.blocked != blocked:
        transition.update(phase=replace(phase, blocked=blocked))
        if fleet.history or no_plan:
            bound = f"starting workers, at most {patience_s:.0f} s" if patience_s < float("inf") else "machines to join"
            transition.notice(f"waiting for {bound}: {blocked.text}{because(fleet)}")


def _which_checkpoint(fleet: Fleet) -> WhichCheckpoint:
    return WhichCheckpoint(after=fleet.generation, saved_step=fleet.recorded.saved_step)


def _wait_for_store(transition: Transition, phase: Idle) -> None:
    """Report a store that does not answer for long; a run that is asked to end does not wait for it."""
    fleet = transition.fleet
    asked = fleet.questions.open.get(_which_checkpoint(fleet))
    if asked is None or transition.now_s < asked.at_s + fleet.config.store_patience_s:
        return
    seconds = f"{fleet.config.store_patience_s:.0f} s"
    text = f"{_job(transition).checkpoint_dir} has not said for {seconds} which checkpoint is its newest"
    blocked = Blocked(Obstacle.NO_ANSWER, text)
    if fleet.requests.finish is not None:
        _end_as_asked(transition, fleet.requests.finish, blocked)
    elif phase.blocked != blocked:
        transition.update(phase=replace(phase, blocked=blocked))
        transition.notice(f"waiting for the store: {text}", warning=True)


def _end_as_asked(transition: Transition, wish: str, blocked: Blocked) -> None:
    """End the run as requested, because the current step, after which it would end, cannot be finished."""
    fleet = transition.fleet
    text = f"{wish}; no step is running, because {blocked.text}"
    saved_step = 0 if fleet.job is not None and fleet.job.rescues else fleet.recorded.saved_step
    unsaved = fleet.recorded.step + 1 - saved_step if fleet.history else 0
    if unsaved > 0:
        text += f". {unsaved} steps are in no checkpoint; the same command repeats them"
    transition.end_run(int(unsaved > 0), text)


def _try_form(transition: Transition, phase: Idle, live: tuple[str, ...]) -> None:
    """Find state and a plan; without either, wait.

    Raises:
        UnansweredError: the checkpoint is being looked for, or the plan is being made.
    """
    fleet, job = transition.fleet, _job(transition)
    if fleet.generations.failed and backoff.waits(transition, phase, live):
        match transition.fleet.phase:
            case Idle(blocked=Blocked() as blocked) if (
                fleet.requests.finish is not None and transition.fleet.generations.failed >= backoff.MANY
            ):
                _end_as_asked(transition, fleet.requests.finish, blocked)
            case _:
                pass
        return
    holdings = {name: _holding(fleet, name).sections for name in live}
    lost = placement.uncovered(len(job.model.sections), holdings)
    if lost and fleet.history and fleet.more_to_come and _just_joined(fleet, transition.now_s):
        return  # nobody's state is kept waiting: whoever comes in the same moment is taken in too
    if lost and awaits_return(transition, phase):
        return
    if phase.rejected is not None and phase.rejected.workers == live:
        _wait(transition, phase, Blocked(Obstacle.NO_PLAN, phase.rejected.text))
        return
    origin = _restore(transition, live) if lost else _Origin(fleet.recorded.step + 1, holdings)
    if not fleet.history and origin.checkpoint and job.micro_batch is None:
        _note_micro_batch(transition, origin.checkpoint.micro_batch)
    try:
        plan, usable = plan_and_workers(transition, live)
    except NoPlanError as error:
        phase = replace(phase, rejected=Rejected(live, str(error)))
        transition.update(phase=phase)
        transition.ask_anew()  # until others are there, a newer checkpoint may be, too
        _wait(transition, phase, Blocked(Obstacle.NO_PLAN, str(error)))
        return
    _start(transition, phase, plan, usable, origin)


def _restore(transition: Transition, live: tuple[str, ...]) -> _Origin:
    """The newest checkpoint, in memory or in the store, or the beginning of the run.

    Raises:
        UnansweredError: it is being looked for.
    """
    if (found := in_memory(transition.fleet, live)) and found[0].step >= transition.fleet.recorded.saved_step:
        return _Origin(found[0].step, found[0].holdings, in_memory=True)
    answer = transition.answer_to(_which_checkpoint(transition.fleet))
    assert isinstance(answer, FoundCheckpoint)
    checkpoint = answer.checkpoint
    return _Origin(next_step=checkpoint.step if checkpoint else 0, checkpoint=checkpoint)


def _tell_origin(transition: Transition, origin: _Origin) -> None:
    """Say where the run goes on, if not where it stopped."""
    fleet, checkpoint, next_step = transition.fleet, origin.checkpoint, origin.next_step
    if origin.in_memory:
        transition.notice(
            f"the last holder of some state was lost; going back from step {fleet.recorded.step + 1} to step "
            f"{next_step}, whose state other workers have in memory"
        )
        return
    where = "the beginning"
    if checkpoint is not None:
        where = f"the checkpoint of step {next_step} in {checkpoint.folder}"
        if _job(transition).rescues:
            where = f"the copy of its state after {next_step} steps"
    if fleet.history and fleet.recorded.step >= next_step:
        transition.notice(
            f"ROLLBACK: the last holder of some state was lost; going back from step {fleet.recorded.step + 1} to "
            f"{where}",
            warning=True,
        )
    elif checkpoint and not fleet.history:
        complete = ", the last one; nothing left to do" * (next_step >= _job(transition).steps)
        transition.notice(f"resuming from {where}{complete}")


def _following(job: JobFacts) -> frozenset[int]:
    """Sections whose optimizer state may come while the first step runs."""
    return frozenset(number for number, section in enumerate(job.model.sections) if section.optimizer_bytes)


def _start(
    transition: Transition,
    phase: Idle,
    plan: Plan,
    usable: tuple[str, ...],
    origin: _Origin,
) -> None:
    """Give all workers a seat, write the generation down, then tell them.

    Those that are not in touch stay out of it, unless it takes them, or what they hold.
    """
    fleet, job = transition.fleet, _job(transition)
    holdings = origin.holdings or {}
    weights = [section.parameter_bytes + section.optimizer_bytes for section in job.model.sections]
    # Old ranks first, so that among equals rank 0 keeps its worker; but before them who has more of a broken step.
    broken = phase.in_flight > 0 and not origin.goes_back
    ordered = sorted(
        usable,
        key=lambda name: (
            not fleet.is_member(name),
            broken and not is_in_whole_replica(fleet, name),
            fleet.rank_of(name) or 0,
        ),
    )
    kept = fleet.record.grid if fleet.history and plan.same_work(fleet.record.plan) else ()
    holders = holders_of(plan, job.model.sections, shared=True) if job.memory.shard_optimizer else None
    lent = {} if origin.in_memory else {name: _holding(fleet, name).lent for name in holdings}
    zones = {name: fleet.machines.zones.get(worker.node, "") for name, worker in fleet.workers.items()}
    classes, ran = fleet.device_classes(fleet.workers), _ran(fleet)
    candidates = [
        placement.Candidate(
            name,
            whole=holdings.get(name, frozenset()),
            lent=lent.get(name, frozenset()),
            ran=ran.get(name, frozenset()),
            node=fleet.workers[name].node,
            zone=zones[name],
            device_class=classes.get(name, ""),
            speed=fleet.speed_of(name),
        )
        for name in ordered
    ]
    seated = placement.seat(plan, candidates, weights, kept=kept, holders=holders)
    # Who has no seat may still be the source of somebody's state, and is waited for as all members are.
    placed = frozenset(seated)
    spares = [name for name in fleet.joined if name not in placed]
    there = {name: holdings[name] for name in holdings if name in placed or fleet.is_in_touch(name)}
    if origin.holdings is None or not placement.uncovered(len(job.model.sections), there):
        spares = [name for name in spares if fleet.is_in_touch(name)]
    members = (*seated, *spares)
    regions = [region_of_zone(zones[name]) for name in members] if any(zones.values()) else []
    moves = (
        placement.transfers(
            plan,
            members,
            holdings,
            weights,
            lent=lent,
            holders=holders,
            following=() if origin.in_memory else _following(job),
            regions=regions,
        )
        if origin.holdings is not None
        else ()
    )
    rollback = origin.goes_back
    needed = () if origin.holdings is None else still_needed(in_memory(fleet, members))
    if rollback:
        _tell_origin(transition, origin)
    stored = origin.checkpoint.sums if origin.checkpoint is not None else None
    begun = None if rollback else salvage(fleet, plan, members, origin.next_step)
    left = begun or remainder_of_stored(stored, plan, job.model)
    if left is not None:
        transition.notice(left.sentence(origin.next_step, stored=rollback))
    if plan.speeds and not (fleet.history and plan.same_work(fleet.record.plan)):
        transition.notice(f"micro-batches are dealt by speed: {shares_text(plan.shares)}")
    undone = fleet.recorded.step + 1 - origin.next_step if rollback and fleet.history else 0
    record = GenerationRecord(
        generation=fleet.generation + 1,
        training=fleet.training,
        began=fleet.generations.began,
        plan=plan,
        members=members,
        cause=" and ".join(map(str, fleet.generations.causes)) or "start",
        first_step=origin.next_step,
        steps_redone=max(0, undone) + phase.in_flight,
        kept_micro_batches=left.kept if left is not None else 0,
        remainder=left,
        keepers=copy_holders(
            plan, [fleet.workers[name].node for name in members[: plan.workers]], regions[: plan.workers]
        ),
        moved_sections=len(moves),
        rollback=rollback,
        losses_per_hour=fleet.loss_rate.planned_per_hour,
        checkpoint=origin.checkpoint.folder if origin.checkpoint else None,
        from_memory=origin.in_memory,
        memory_steps=needed,
    )
    _keep_micro_batch(transition, plan)
    drop_unreachable(transition)
    transition.update(
        phase=Running(began_s=fleet.listened_s),
        **begin_progress(transition.fleet, record),
        generations=transition.fleet.generations.with_next(
            record,
            broke_s=phase.since_s if not fleet.history else fleet.generations.broke_s,
            planned=fleet.generations.planned and phase.in_flight == 0,
        ),
        speeds=fleet.speeds.of_next_generation(),
        requests=fleet.requests.without_morph(),
        questions=transition.fleet.questions.anew(),
        recorded=begin_recording(transition.fleet, record, origin.checkpoint),
    )
    transition.publish(GenerationStarted(record=record))
    losses: Mapping[int, MicroBatchLoss] = {}
    if left is not None:
        losses = {each.micro_batch: each for each in stored.losses} if stored else losses_of(fleet, members, plan)
    for name, assignment in assignments(transition.fleet.history, (*moves, *sums_moved(left)), losses):
        transition.send(name, Assign(assignment=assignment))


def _keep_micro_batch(transition: Transition, plan: Plan) -> None:
    """The micro-batch size belongs to the run; say so when it has to change."""
    kept = transition.fleet.generations.micro_batch
    if kept is not None and plan.micro_batch != kept:
        transition.notice(
            f"no plan fits with micro-batches of {kept}; using {plan.micro_batch} from now on", warning=True
        )
    _note_micro_batch(transition, plan.micro_batch)


def _note_micro_batch(transition: Transition, micro_batch: int) -> None:
    transition.update(generations=changed(transition.fleet.generations, micro_batch=micro_batch))


def _ran(fleet: Fleet) -> placement.Holdings:
    """Sections that each rank of the newest generation that trained has run."""
    for record in reversed(fleet.history):
        if record.recovery_seconds is not None or record.generation == record.began:
            plan = record.plan
            return {name: frozenset(plan.sections_at(rank)) for rank, name in enumerate(record.grid)}
    return {}


def _holding(fleet: Fleet, name: str) -> WorkerInventory:
    """Return what a worker holds; nothing, if it has just come."""
    return fleet.workers[name].holding or WorkerInventory()


def _job(transition: Transition) -> JobFacts:
    """The run's job, known once a worker has joined."""
    assert transition.fleet.job is not None
    return transition.fleet.job


def assignments(
    history: Sequence[GenerationRecord], moves: Sequence[Transfer], losses: Mapping[int, MicroBatchLoss]
) -> Iterator[tuple[str, Assignment]]:
    """Each member of the newest generation in ``history``, with its part in it.

    Args:
        history: all generations.
        moves: those of all ranks.
        losses: by micro-batch, what is known of a step that was broken off.
    """
    record = history[-1]
    own: dict[int, list[Transfer]] = {}
    for move in moves:
        for rank in (move.source_rank, move.target_rank):
            own.setdefault(rank, []).append(move)
    lost, left = _lost_replicas(history), record.remainder
    known = [losses[number] for number in sorted(losses)]
    for rank, name in enumerate(record.members):
        yield (
            name,
            Assignment(
                generation=record.generation,
                plan=record.plan,
                rank=rank,
                members=len(record.members),
                next_step=record.first_step,
                transfers=tuple(own.get(rank, ())),
                rest=None if left is None else left.rest_of(record.plan, rank, known),
                lost_replicas=lost.get(name, ()),
                copy_to=record.copied_to(rank),
                copy_from=record.copied_from(rank),
                checkpoint=record.checkpoint,
                fresh=record.rollback and record.checkpoint is None and not record.from_memory,
                from_memory=record.from_memory,
                memory_steps=record.memory_steps,
                losses_per_hour=record.losses_per_hour,
            ),
        )


def _lost_replicas(history: Sequence[GenerationRecord]) -> Mapping[str, tuple[int, ...]]:
    """For each rank's worker of the newest generation that trained: replicas that have lost its sections since."""
    trained = next((record for record in reversed(history[:-1]) if record.recovery_seconds is not None), None)
    if trained is None:
        return {}
    plan, here = trained.plan, history[-1].ranks
    gone: dict[int, set[int]] = {section: set() for section in range(plan.sections)}
    for rank, name in enumerate(trained.grid):
        if name not in here:
            for section in plan.sections_at(rank):
                gone[section].add(plan.place_of(rank).replica)
    if not any(gone.values()):
        return {}
    return {
        name: tuple(sorted(set[int]().union(*(gone[section] for section in plan.sections_at(rank)))))
        for rank, name in enumerate(trained.grid)
    }
