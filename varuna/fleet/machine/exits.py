"""Deaths and departures: preempted, frozen, failed, or done.

its process exits        note_exited           ┐
its connection ends      note_connection_lost  ├─ noted; expire concludes: the worker is lost, or the run ends
it says Failed           note_failed           ┘
it says Leaving          note_leaving ─> finish_if_all_left ─> finish_run, once the scripts have ended
"""

import signal
from dataclasses import replace

from varuna.core.messages import Failed
from varuna.fleet.machine.commit import choose_verdict, commit, record_votes, send_holds
from varuna.fleet.machine.device_faults import is_only_machine, note_error, note_fault
from varuna.fleet.machine.leases import is_gone, return_patience_s
from varuna.fleet.machine.outcome import outcome, steps_made
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import ConnectionLost, WorkerExited
from varuna.fleet.state.phases import Ended, Finishing, Idle, Running, Stopping
from varuna.fleet.state.worker import Exit, Worker, WorkerStatus, changed


def note_exited(transition: Transition, event: WorkerExited) -> None:
    """Note that a process ended. Only a signal decides at once; else its last messages may still be on their way."""
    worker = transition.fleet.workers.get(event.worker)
    if worker is None:
        return
    if event.code >= 0:
        transition.update_worker(event.worker, exit=Exit(event.code, event.stderr_tail, transition.now_s))
        transition.watch_worker(event.worker)
    elif worker.standing in (WorkerStatus.LEFT, WorkerStatus.DISMISSED):
        transition.part_with(event.worker)
        if not transition.fleet.config.replace:  # nor for the script's next training
            transition.want_workers(-1)
    else:
        transition.lose_worker(
            event.worker, _KILLED_FOR_MEMORY if event.is_oom else f"killed by {_signal_name(-event.code)}"
        )


_KILLED_FOR_MEMORY = (
    "killed by SIGKILL: its machine, or its container, ran out of host memory (docs/memory.md says what takes how much)"
)


def note_connection_lost(transition: Transition, event: ConnectionLost) -> None:
    """Note that a connection ended; soon it will be known whether its process did."""
    if event.worker in transition.fleet.workers:
        transition.update_worker(event.worker, disconnected_s=transition.now_s)
        transition.watch_worker(event.worker)


def note_failed(transition: Transition, name: str, failed: Failed) -> None:
    """Conclude what a worker's own code raised.

    Once it is through with its steps, there is nobody else who could finish its script.
    """
    fleet, worker, fault = transition.fleet, transition.fleet.workers[name], failed.fault
    if worker.standing is WorkerStatus.DISMISSED:
        return
    nobody_has_begun = not _has_begun(fleet) and is_only_machine(fleet, worker.node)
    if fault is None or worker.standing is WorkerStatus.LEFT or (fault.of_machine and nobody_has_begun):
        text = f"worker {_title(fleet, name)} failed: {failed.summary}"
        _conclude_error(transition, name, text, failed.exit_code, f"\n{failed.traceback}".rstrip(), failed.accused)
    else:
        note_fault(transition, name, fault)


def note_leaving(transition: Transition, name: str, training: int, step: int = 0) -> None:
    """Note that a worker's loop is over, after so many steps of a training."""
    fleet = transition.fleet
    if training == fleet.training and fleet.is_member(name) and fleet.is_joined(name):
        transition.update_worker(name, standing=WorkerStatus.LEFT, holding=None)
        transition.update(
            generations=changed(fleet.generations, departed=fleet.generations.departed | {name}),
            script=changed(fleet.script, left_step=max(fleet.script.left_step, step)),
        )
        transition.hasten()


def expire(transition: Transition) -> None:
    """Draw conclusions from deadlines that have passed.

    All workers are looked at only when somebody's time may be up; those with something unusual about them at each tick,
    and one of whom an event tells at once.
    """
    fleet, due_s = transition.fleet, transition.fleet.contacts.expiring_s
    if due_s == float("-inf") or (transition.is_tick and transition.now_s >= due_s):
        names = list(fleet.workers)
        due_s = min((_due_s(fleet, worker) for worker in fleet.workers.values()), default=float("inf"))
        transition.update(contacts=fleet.contacts.expiring(due_s))
    elif transition.is_tick:
        names = sorted(fleet.contacts.watched)
    else:
        names = sorted(transition.touched)
    for name in names:
        if isinstance(transition.fleet.phase, Ended):
            return
        worker = transition.fleet.workers.get(name)
        if worker is None:
            continue
        if worker.exit is not None:
            _conclude_exit(transition, worker, worker.exit)
        elif worker.standing is WorkerStatus.JOINED:
            _check_joined(transition, worker)
        elif worker.standing is WorkerStatus.STARTING:
            _check_starting(transition, worker)
    unusual = (
        frozenset(name for name in transition.fleet.contacts.watched if _is_unusual(transition.fleet, name))
        if transition.is_tick
        else None
    )
    if unusual is not None and unusual != transition.fleet.contacts.watched:
        transition.update(contacts=transition.fleet.contacts.watching(unusual))


def _due_s(fleet: Fleet, worker: Worker) -> float:
    """Return when an unwatched worker's time is up at the earliest, if nothing is heard of it until then.

    Silence of an elastic fleet's workers is noticed when their machine is heard.
    """
    config, suspected = fleet.config, isinstance(fleet.phase, Running) and fleet.phase.suspicion is not None
    if worker.standing is WorkerStatus.STARTING:
        patience_s = config.start_timeout_s
    elif worker.standing is WorkerStatus.JOINED and not config.elastic:
        patience_s = config.suspect_lease_s if suspected else config.lease_s
    else:
        return float("inf")
    return fleet.contacts.ticked_s + fleet.seen_s(worker) + patience_s - fleet.listened_s


def _is_unusual(fleet: Fleet, name: str) -> bool:
    worker = fleet.workers.get(name)
    return worker is not None and (worker.exit is not None or worker.disconnected_s is not None)


def _check_joined(transition: Transition, worker: Worker) -> None:
    """Lose a worker that is silent while its machine is heard (frozen), or that has no connection."""
    config, phase = transition.fleet.config, transition.fleet.phase
    suspected = isinstance(phase, Running) and phase.suspicion is not None
    silent_s = transition.fleet.silence_s(worker)
    if worker.disconnected_s is not None and transition.now_s >= worker.disconnected_s + config.exit_grace_s:
        transition.lose_worker(worker.name, "closed its connection", kill=True)
    elif is_gone(transition.fleet, worker):
        transition.lose_worker(
            worker.name, "is gone: its agent's connection closed, and a peer lost its link", kill=True
        )
    elif silent_s > (config.suspect_lease_s if suspected else config.lease_s):
        transition.lose_worker(worker.name, f"froze (no heartbeat for {silent_s:.1f} s)", kill=True)


def _check_starting(transition: Transition, worker: Worker) -> None:
    """Lose a worker that does not become warm in time; another one is started."""
    config = transition.fleet.config
    if worker.disconnected_s is not None and transition.now_s >= worker.disconnected_s + config.exit_grace_s:
        transition.lose_worker(worker.name, "closed its connection before joining", kill=True)
    elif transition.fleet.listened_s >= worker.seen_s + config.start_timeout_s:
        transition.lose_worker(
            worker.name, f"did not join within {config.start_timeout_s:.0f} s of starting", kill=True
        )


def _conclude_exit(transition: Transition, worker: Worker, exit_: Exit) -> None:
    """Conclude the exit of a process that ended by itself, once all its messages have been heard."""
    fleet = transition.fleet
    if worker.disconnected_s is None and transition.now_s < exit_.at_s + fleet.config.exit_grace_s:
        return
    if exit_.code == 0 and fleet.job is None and not fleet.script.trainings:
        transition.end_run(
            2,
            "the script ended without calling trainer.steps(n), so nothing was trained. "
            "Loop over trainer.steps(n) in it; a script that does not train runs with `python` alone.",
        )
        return
    left = worker.standing is WorkerStatus.LEFT
    expected = worker.standing is WorkerStatus.DISMISSED or (isinstance(fleet.phase, Finishing) and not left)
    if expected or (left and exit_.code == 0):
        if exit_.code == 0 and (left or isinstance(fleet.phase, Finishing)):
            is_main = fleet.script.main_ended or worker.name == fleet.members[0]
            transition.update(script=changed(fleet.script, main_ended=is_main, ended=True))
        transition.part_with(worker.name)
        return
    if fleet.script.trainings and exit_.code == 0 and worker.standing is WorkerStatus.STARTING:
        number = fleet.training + 1
        transition.do_without(worker.name, f"worker {worker.name} ended before training {number} of its script began")
        return
    when = "after its last step" if left else "before its training was done"
    text = f"worker {_title(fleet, worker.name)} ended with exit code {exit_.code} {when}"
    tail = f". The end of its stderr:\n{exit_.stderr_tail.rstrip()}" if exit_.stderr_tail.strip() else ""
    _conclude_error(transition, worker.name, text, exit_.code if exit_.code in (1, 2, 3) else 1, tail)


def _conclude_error(
    transition: Transition, name: str, text: str, exit_code: int, detail: str, accused: int | None = None
) -> None:
    """Go on without a worker that failed, as long as that may be the matter of its machine alone; else end the run."""
    if _is_outsider(transition.fleet, name):
        transition.do_without(name, f"{text}. {_WITHOUT}{detail}")
    elif _is_dispensable(transition.fleet, name):
        transition.notice(
            f"{text}. Its machine may be to blame: rank 0 runs the script to its end{detail}", warning=True
        )
        transition.part_with(name)
    elif transition.fleet.workers[name].standing is WorkerStatus.LEFT:
        transition.forget_worker(name)
        transition.end_run(exit_code, text + detail, worker=name)
    else:
        note_error(transition, name, text, exit_code=exit_code, detail=detail, accused=accused)


_WITHOUT = "The run trains without it: look at what this machine lacks (packages, mounts, drivers)"


def _is_dispensable(fleet: Fleet, name: str) -> bool:
    """Return whether a worker is behind its loop, and rank 0 ends the script on another machine, or has."""
    worker, main = fleet.workers[name], fleet.workers.get(fleet.members[0]) if fleet.members else None
    if not fleet.config.elastic or worker.standing is not WorkerStatus.LEFT:
        return False
    if fleet.script.main_ended or main is None or main.node == worker.node:
        return fleet.script.main_ended
    has_all = fleet.job is not None and fleet.recorded.step + 1 >= fleet.job.steps
    return has_all or main.standing is WorkerStatus.LEFT  # else the worker has broken its loop off


def _is_outsider(fleet: Fleet, name: str) -> bool:
    """Return whether a worker never had a seat in a run that has done a step: the script works elsewhere."""
    has_trained = fleet.workers[name].trained or any(name in record.ranks for record in fleet.history)
    return _has_begun(fleet) and not has_trained


def _has_begun(fleet: Fleet) -> bool:
    return fleet.recorded.step >= 0 or bool(fleet.script.trainings)


def finish_if_all_left(transition: Transition) -> None:
    """Finish the run when no rank of the grid is left in it; spares and newcomers are dismissed."""
    fleet = transition.fleet
    # A worker that has joined and is not a newcomer has a seat.
    if fleet.is_leaving and fleet.workers.count(WorkerStatus.JOINED) == len(fleet.workers.newcomers):
        record_votes(transition)
        transition.update(phase=Finishing())


def settle_leaving(transition: Transition, phase: Idle | Stopping) -> None:
    """A generation broke while its members were leaving: the last step is committed, and whoever lives applies it.

    Who answers Hold was stopped by the broken link: it hears the verdict like in any other step, and is dismissed once
    it has the last step. A member that does not answer is still saving, and will leave.
    """
    fleet = transition.fleet
    answered = [name for name in fleet.live_members if fleet.workers[name].holding is not None]
    if isinstance(phase, Stopping):
        send_holds(transition, phase)
        for name in phase.applying if fleet.listened_s >= phase.deadline_s else ():
            if transition.fleet.is_joined(name):
                transition.lose_worker(
                    name, f"did not apply the last step within {fleet.config.hold_timeout_s:.0f} s", kill=True
                )
    record_votes(transition)
    if isinstance(transition.fleet.phase, Ended):
        return
    vote, laggards = choose_verdict(transition, answered)
    if vote is not None and laggards:
        before = transition.fleet.phase
        commit(transition, before if isinstance(before, Stopping) else _stopping(transition.fleet), vote, laggards)
    for name in answered:
        if name not in laggards:
            _dismiss(transition, name)
    finish_if_all_left(transition)


def _stopping(fleet: Fleet) -> Stopping:
    return Stopping(planned=False, deadline_s=fleet.listened_s)


def finish_run(transition: Transition, phase: Finishing) -> None:
    """Wait until the scripts of those who left have ended; rank 0's may take its time, and then the others are bounded.

    If rank 0 was killed, the others go on, to the script's next training it may be.
    """
    dismiss_rest(transition)
    if transition.is_tick:
        _expect_no_unreachable(transition)
    fleet = transition.fleet
    waiting = fleet.workers.unfinished > 0
    if waiting and (fleet.members[0] in fleet.workers or (not fleet.script.main_ended and _is_anybody_heard(fleet))):
        return
    if fleet.is_orphaned and _waits_for_others(transition, phase):
        return
    if waiting and phase.deadline_s is None:
        transition.update(phase=Finishing(deadline_s=transition.now_s + fleet.config.leave_timeout_s))
    elif not waiting or (phase.deadline_s is not None and transition.now_s >= phase.deadline_s):
        done, wish, job = fleet.recorded.step + 1, fleet.requests.finish, fleet.job
        is_cut_short = wish is not None and job is not None and done < job.steps
        of = f" in training {fleet.training + 1} of the script" if fleet.script.trainings else ""
        words = (f"{done} steps done{of}", wish if wish is not None and is_cut_short else "")
        transition.end_run(0, ": ".join(filter(None, words)))


def dismiss_rest(transition: Transition) -> None:
    """Tell those that had no part in the end of a training that it is over."""
    if transition.fleet.workers.count(WorkerStatus.JOINED) or transition.fleet.workers.count(WorkerStatus.UNREACHABLE):
        for name, worker in transition.fleet.workers.items():
            if worker.standing in (WorkerStatus.JOINED, WorkerStatus.UNREACHABLE):
                _dismiss(transition, name)


def _waits_for_others(transition: Transition, phase: Finishing) -> bool:
    """Return whether others can go on with a script whose workers were all lost behind its loop."""
    fleet = transition.fleet
    if fleet.requests.finish is not None:
        return False
    since_s = transition.now_s if phase.orphaned_s is None else phase.orphaned_s
    if fleet.more_to_come and transition.now_s < since_s + fleet.config.wait_s:
        if phase.orphaned_s is None:
            transition.update(phase=replace(phase, orphaned_s=since_s))
            transition.notice("all workers were lost behind the loop: others run the script to its end", warning=True)
        return True
    transition.end_run(
        1,
        f"{steps_made(fleet)} steps are done, and all workers were lost before the script came to its end. Start the "
        "same command again: it goes on behind what checkpoints= has kept.",
    )
    return True


def _is_anybody_heard(fleet: Fleet) -> bool:
    """Return whether a worker that was there at the end still beats, so that its script runs."""
    return any(
        fleet.listened_s - worker.seen_s <= fleet.config.lease_s
        for worker in fleet.workers.values()
        if worker.standing is WorkerStatus.LEFT or (worker.standing is WorkerStatus.DISMISSED and worker.seated)
    )


def _expect_no_unreachable(transition: Transition) -> None:
    """Expect nothing more from workers that left and were out of contact for long."""
    fleet = transition.fleet
    for name, worker in fleet.workers.items():
        unheard_s = (
            transition.now_s - fleet.contacts.heard_s if fleet.contacts.is_alone else fleet.unheard_s(worker.node)
        )
        if worker.standing is WorkerStatus.LEFT and unheard_s > return_patience_s(fleet):
            transition.notice(f"worker {name} is out of sight, so the outcome of its script is unknown", warning=True)
            transition.forget_worker(name)
            # Perhaps it has ended; nobody waits to learn it.
            transition.update(script=changed(fleet.script, ended=True))


def _dismiss(transition: Transition, name: str) -> None:
    """Release a worker that has nothing left to do."""
    transition.send(name, outcome(transition.fleet, name))
    transition.update_worker(name, standing=WorkerStatus.DISMISSED)


def _title(fleet: Fleet, name: str) -> str:
    """``w2 (rank 1, generation 3)``."""
    rank = fleet.rank_of(name)
    return name if rank is None else f"{name} (rank {rank}, generation {fleet.generation})"


def _signal_name(number: int) -> str:
    """``SIGKILL``, or the number if it has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
