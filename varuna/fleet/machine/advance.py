"""The manager as a pure state machine: ``advance`` notes one event, then draws conclusions until nothing changes.

    Idle ──── start_generation ───> Running ──── finish_if_all_left ───> Finishing ── finish_run ──> Ended
     ^                                 │
     │                                 └─ watch_generation ─> Stopping
     └───────────────── resolve_stop ──────────────────────────┘

Before the rule of the phase, in each pass (``_pass``), workers are lost, put aside, readmitted and released.
"""

from varuna.core.messages import (
    Beat,
    Failed,
    Finish,
    FromWorker,
    Hello,
    Leaving,
    Saved,
    StopReport,
    Suspect,
    TrainingOver,
    Unsaved,
    Voted,
)
from varuna.fleet.machine.commit import (
    note_checkpoint,
    note_held,
    note_saved,
    note_suspect,
    note_voted,
    resolve_stop,
    watch_generation,
)
from varuna.fleet.machine.exits import (
    dismiss_rest,
    expire,
    finish_if_all_left,
    finish_run,
    note_connection_lost,
    note_exited,
    note_failed,
    note_leaving,
    settle_leaving,
)
from varuna.fleet.machine.forming import start_generation
from varuna.fleet.machine.joins import is_unequal, note_hello, note_spawned, send_away, spawn_missing
from varuna.fleet.machine.leases import (
    check_reachability,
    hear_all,
    note_parted,
    note_tick,
    readmit_worker,
    record_contact,
)
from varuna.fleet.machine.leases import note_beat as note_waiting
from varuna.fleet.machine.outcome import last_step, outcome, steps_made
from varuna.fleet.machine.planned_morphs import plan_ahead
from varuna.fleet.machine.preemption import note_drain, note_notice, release_leaving, reprieve
from varuna.fleet.machine.standstill import note_standstill
from varuna.fleet.machine.stragglers import note_beat, note_speeds, readmit
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    AnswerReceived,
    CheckpointCompleted,
    ConnectionLost,
    DrainRequested,
    Event,
    FinishRequested,
    Heard,
    MessageReceived,
    MorphRequested,
    NodeParted,
    NoticeReceived,
    Recalibrated,
    SaveRequested,
    SpawnRequested,
    StopRequested,
    Tick,
    WorkerDistrusted,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Complain, Instruction
from varuna.fleet.state.phases import Ended, Finishing, Idle, Running, Stopping
from varuna.fleet.state.run_events import Asked, TrainingEnded
from varuna.fleet.state.worker import WorkerStatus, changed


def begin_next_training(transition: Transition) -> None:
    """Begin the next training with those that wait for it; the others come when they are through with their code."""
    fleet = transition.fleet
    assert fleet.job is not None
    waiting = {name: hello for name, hello in fleet.script.ahead.items() if name in fleet.workers}
    if not waiting:
        transition.update(script=changed(fleet.script, ahead={}))
        return
    dismiss_rest(transition)
    fleet = transition.fleet
    ended = TrainingEnded(training=fleet.training, job=fleet.job, steps=steps_made(fleet), last=last_step(fleet))
    transition.fleet = fleet.begin_training(ended, transition.now_s)
    transition.publish(ended)
    for name, hello in waiting.items():
        hear_hello(transition, name, hello)


def hear_hello(transition: Transition, name: str, hello: Hello) -> None:
    """Take a worker into the training that it begins; or let it pass that, or wait for it."""
    fleet = transition.fleet
    if hello.training > fleet.training:
        _note_ahead(transition, name, hello)
    elif hello.training < fleet.training:
        ended = fleet.script.trainings[hello.training]
        if not is_unequal(transition, name, hello, ended.job):
            transition.send(name, TrainingOver(training=ended.training, steps=ended.steps, last=ended.last))
    elif not isinstance(fleet.phase, Finishing):
        note_hello(transition, name, hello)
    elif fleet.workers[name].standing is not WorkerStatus.LEFT:
        assert fleet.job is not None
        if not is_unequal(transition, name, hello, fleet.job):
            transition.send(name, outcome(fleet, name))


def _note_ahead(transition: Transition, name: str, hello: Hello) -> None:
    """Note that a worker is through with the present training and begins the next one."""
    fleet, number = transition.fleet, hello.training
    is_ending = isinstance(fleet.phase, Finishing) or fleet.is_leaving
    if fleet.workers[name].standing is WorkerStatus.DISMISSED and not is_ending:
        transition.send(name, Finish(training=number))  # its machine was given back: it trains no more
    elif number > fleet.training + 1:
        send_away(
            transition,
            name,
            f"it begins training {number + 1} of its script, and the run is in training {fleet.training + 1}",
        )
    elif fleet.requests.finish is not None:
        text = f"{fleet.requests.finish}; training {number + 1} of the script does not begin"
        note_leaving(transition, name, fleet.training)  # it is through, whatever of its words was lost
        transition.send(name, Finish(failure=text, training=number))
        transition.update_worker(name, standing=WorkerStatus.DISMISSED)
    else:
        note_leaving(transition, name, fleet.training)
        transition.update(script=changed(transition.fleet.script, ahead={**fleet.script.ahead, name: hello}))


def advance(fleet: Fleet, event: Event, now_s: float) -> tuple[Fleet, list[Instruction]]:
    """Apply one event; return the next fleet and what the shell must do, in this order.

    Nothing here waits, for anybody: what takes time to find out is asked for (see ``questions``).
    """
    transition = Transition(fleet, now_s, is_tick=isinstance(event, Tick))
    if not isinstance(fleet.phase, Ended):
        _note(transition, event)
        if not _is_pulse(event):  # there are many, and time passes soon
            _conclude(transition)
    return transition.fleet, transition.instructions


def _is_pulse(event: Event) -> bool:
    """Return whether somebody only says that it lives."""
    return isinstance(event, Heard) or (isinstance(event, MessageReceived) and isinstance(event.message, Beat))


def _note(transition: Transition, event: Event) -> None:
    """Take down what happened."""
    match event:
        case Tick(deaf_s=deaf_s):
            note_tick(transition, deaf_s)
        case Heard(nodes=nodes, workers=workers):
            hear_all(transition, nodes, workers)
        case NodeParted(node=node, abruptly=abruptly):
            note_parted(transition, node, abruptly=abruptly)
        case WorkerSpawned(worker=name, node=node):
            record_contact(transition, node)
            note_spawned(transition, name, node)
        case MessageReceived() | WorkerExited() | ConnectionLost() | WorkerDistrusted():
            worker = transition.fleet.workers.get(event.worker)
            if worker is not None:  # the lost and the refused are not heard any more
                record_contact(transition, worker.node)
                _note_worker(transition, event)
        case NoticeReceived(node=node, notice=notice):
            record_contact(transition, node)
            note_notice(transition, node, notice)
        case DrainRequested(node=node):
            note_drain(transition, node)
        case CheckpointCompleted() | AnswerReceived() | Recalibrated():
            _note_found(transition, event)
        case SpawnRequested() | MorphRequested() | SaveRequested() | FinishRequested() | StopRequested():
            _note_wish(transition, event)


def _note_found(transition: Transition, event: CheckpointCompleted | AnswerReceived | Recalibrated) -> None:
    """Take down what the shell has done or found out."""
    match event:
        case CheckpointCompleted(step=step):
            note_checkpoint(transition, step)
        case AnswerReceived(question=question, number=number, answer=answer):
            transition.note_answer(question, number, answer)
        case Recalibrated(generation=generation, expected_s=expected_s, link_bytes_per_s=link_bytes_per_s):
            if generation == transition.fleet.generation:
                transition.ask_anew()
                note_speeds(transition, expected_s, link_bytes_per_s)


def _note_wish(
    transition: Transition, event: SpawnRequested | MorphRequested | SaveRequested | FinishRequested | StopRequested
) -> None:
    """Take down what somebody wants; what only a later moment can bring is promised in the journal."""
    requests = transition.fleet.requests
    match event:
        case SpawnRequested(count=count):
            transition.want_workers(count)
        case MorphRequested(why=why):
            if requests.morph is None:
                transition.publish(Asked(what="morph"))
                transition.ask_anew()  # whoever asks may know that something has changed
            transition.update(requests=changed(requests, morph=why))
        case SaveRequested():
            transition.update(requests=changed(requests, save=True))
        case FinishRequested(reason=reason):
            if requests.finish is None:
                transition.publish(Asked(what="stop", reason=reason))
                transition.update(requests=changed(requests, finish=reason))
        case StopRequested(reason=reason, exit_code=exit_code):
            transition.end_run(exit_code, reason)


def _note_worker(
    transition: Transition, event: MessageReceived | WorkerExited | ConnectionLost | WorkerDistrusted
) -> None:
    """Take down what happened to one worker."""
    match event:
        case MessageReceived(worker=name, message=message):
            _hear(transition, name, message)
        case WorkerExited():
            note_exited(transition, event)
        case ConnectionLost():
            note_connection_lost(transition, event)
        case WorkerDistrusted(worker=name, reason=reason):
            transition.lose_worker(name, f"was removed: {reason}", kill=True)


def _hear(transition: Transition, name: str, message: FromWorker) -> None:
    """Take down what a worker said; whatever it is, the worker is alive."""
    worker, seen_s = transition.fleet.workers[name], transition.fleet.contacts.listened_s
    if worker.standing is WorkerStatus.UNREACHABLE:
        readmit_worker(transition, name)
    if isinstance(message, Beat):
        note_waiting(transition, name, message)
        transition.update_worker(name, seen_s=seen_s, **worker.hearing(message))
    else:
        transition.update_worker(name, seen_s=seen_s)
    match message:
        case Beat():
            note_beat(transition, name, message)
        case Hello():
            hear_hello(transition, name, message)
        case StopReport():
            note_held(transition, name, message)
        case Voted(vote=vote):
            note_voted(transition, name, vote)
        case Suspect():
            note_suspect(transition, name, message)
        case Saved(shard=shard):
            note_saved(transition, shard)
        case Unsaved(reason=reason):
            transition.instructions.append(Complain(name, reason))
        case Failed():
            note_failed(transition, name, message)
        case Leaving(training=training, step=step):
            note_leaving(transition, name, training, step)


def _conclude(transition: Transition) -> None:
    """Let the rules of each phase act until they have nothing more to say.

    This ends by construction. Another pass follows only if the last one has made something grow that cannot grow for
    ever: workers are lost, or go on in their life, or the phase goes on in its own; and a pass starts at most one
    generation, of which one event starts at most two. Whatever else a rule changes can wait for the next tick.
    """
    begun, before = transition.fleet.generation, None
    while before is None or (before < _reached(transition.fleet) and transition.fleet.generation <= begun + 1):
        before = _reached(transition.fleet)
        _pass(transition)
        if isinstance(transition.fleet.phase, Ended):
            return
    if not isinstance(transition.fleet.phase, Finishing) or transition.fleet.is_orphaned:
        spawn_missing(transition)


_PHASES = (Running, Stopping, Idle, Finishing, Ended)
"""In the order of a generation's life."""
_LIFE = tuple(WorkerStatus)
"""In the order of a worker's life."""


def _reached(fleet: Fleet) -> tuple[int, int, int, int, int]:
    """Measure how far the run has come: between two generations each number has a bound; the first to differ counts."""
    lived = sum(order * fleet.workers.count(standing) for order, standing in enumerate(_LIFE))
    return fleet.training, fleet.generation, -len(fleet.workers), lived, _PHASES.index(type(fleet.phase))


def _pass(transition: Transition) -> None:
    """Each rule acts once."""
    if not isinstance(transition.fleet.phase, Ended):
        expire(transition)
        check_reachability(transition)
        reprieve(transition)
        readmit(transition)
        release_leaving(transition)
    match transition.fleet.phase:
        case (Idle() | Stopping()) as phase if transition.fleet.is_leaving:
            settle_leaving(transition, phase)
        case Idle() as phase:
            start_generation(transition, phase)
        case Running() as phase:
            note_standstill(transition, phase)
            watch_generation(transition, phase)
            finish_if_all_left(transition)
            if transition.fleet.phase is phase:
                plan_ahead(transition, phase)
        case Stopping() as phase:
            resolve_stop(transition, phase)
        case Finishing() if transition.fleet.script.ahead:
            begin_next_training(transition)
        case Finishing() as phase:
            finish_run(transition, phase)
        case Ended():
            return
