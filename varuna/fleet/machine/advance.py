"""The manager as a pure state machine: ``advance`` notes one event, then draws conclusions until nothing changes."""

from varuna.core.messages import Beat, Failed, FromWorker, Held, Hello, Leaving, Saved, Suspect, Unsaved, Voted
from varuna.fleet.machine.commit import note_held, note_suspect, note_voted, settle, watch_generation
from varuna.fleet.machine.exits import (
    expire,
    finish,
    finish_if_all_left,
    note_connection_lost,
    note_exited,
    note_failed,
    note_leaving,
    settle_leaving,
)
from varuna.fleet.machine.forming import form
from varuna.fleet.machine.joins import note_hello, note_spawned, spawn_missing
from varuna.fleet.machine.leases import hear, look_around, note_parted, note_tick, take_back
from varuna.fleet.machine.leases import note_beat as note_waiting
from varuna.fleet.machine.planned_morphs import plan_ahead
from varuna.fleet.machine.preemption import note_departure, release, reprieve
from varuna.fleet.machine.standstill import note_standstill
from varuna.fleet.machine.stragglers import note_beat, readmit
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import FinishWish
from varuna.fleet.state.fleet import Ended, Finishing, Fleet, Idle, Running, Stopping
from varuna.fleet.state.inputs import (
    AnswerReceived,
    ConnectionLost,
    DrainRequested,
    Event,
    FinishRequested,
    MessageReceived,
    MorphRequested,
    NodeHeard,
    NodeParted,
    NoticeReceived,
    Recalibrated,
    SpawnRequested,
    StopRequested,
    Tick,
    WorkerDistrusted,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Collect, Complain, Instruction
from varuna.fleet.state.run_events import Asked
from varuna.fleet.state.worker import Standing


def advance(fleet: Fleet, event: Event, now_s: float) -> tuple[Fleet, list[Instruction]]:
    """Apply one event; return the next fleet and what the shell must do, in this order.

    Nothing here waits, for anybody: what takes time to find out is asked for (see ``questions``).
    """
    turn = Transition(fleet, now_s, is_tick=isinstance(event, Tick))
    if not isinstance(fleet.phase, Ended):
        _note(turn, event)
        if not _is_pulse(event):  # there are many, and time passes soon
            _conclude(turn)
    return turn.fleet, turn.instructions


def _is_pulse(event: Event) -> bool:
    """Whether somebody only says that it lives."""
    return isinstance(event, NodeHeard) or (isinstance(event, MessageReceived) and isinstance(event.message, Beat))


def _note(turn: Transition, event: Event) -> None:
    """Take down what happened."""
    match event:
        case Tick(deaf_s=deaf_s):
            note_tick(turn, deaf_s)
        case NodeHeard(node=node):
            hear(turn, node)
        case NodeParted(node=node, abruptly=abruptly):
            note_parted(turn, node, abruptly=abruptly)
        case WorkerSpawned(worker=name, node=node):
            hear(turn, node)
            note_spawned(turn, name, node)
        case MessageReceived() | WorkerExited() | ConnectionLost() | WorkerDistrusted():
            if event.worker in turn.fleet.workers:  # the lost and the refused are not heard any more
                _note_worker(turn, event)
        case NoticeReceived() | DrainRequested():
            note_departure(turn, event)
        case AnswerReceived(question=question, number=number, answer=answer):
            turn.note_answer(question, number, answer)
        case Recalibrated(generation=generation, expected_s=expected_s):
            if generation == turn.fleet.generation:
                turn.ask_anew()
                turn.update(expected_s=expected_s)
        case SpawnRequested() | MorphRequested() | FinishRequested() | StopRequested():
            _note_wish(turn, event)


def _note_wish(turn: Transition, event: SpawnRequested | MorphRequested | FinishRequested | StopRequested) -> None:
    """Take down what somebody wants; what only a later moment can bring is promised in the journal."""
    match event:
        case SpawnRequested(count=count):
            turn.update(wanted=turn.fleet.wanted + count)
        case MorphRequested(why=why):
            if not turn.fleet.morph_asked:
                turn.publish(Asked(what="morph"))
                turn.ask_anew()  # whoever asks may know that something has changed
            turn.update(morph_asked=True, morph_reason=why)
        case FinishRequested(reason=reason):
            if turn.fleet.finish is None:
                turn.publish(Asked(what="stop", reason=reason))
                turn.update(finish=FinishWish(reason))
        case StopRequested(reason=reason, exit_code=exit_code):
            turn.end(exit_code, reason)


def _note_worker(turn: Transition, event: MessageReceived | WorkerExited | ConnectionLost | WorkerDistrusted) -> None:
    """Take down what happened to one worker."""
    hear(turn, turn.fleet.workers[event.worker].node)
    match event:
        case MessageReceived(worker=name, message=message):
            _hear(turn, name, message)
        case WorkerExited():
            note_exited(turn, event)
        case ConnectionLost():
            note_connection_lost(turn, event)
        case WorkerDistrusted(worker=name, reason=reason):
            turn.lose(name, f"was removed: {reason}", kill=True)


def _hear(turn: Transition, name: str, message: FromWorker) -> None:
    """Take down what a worker said; whatever it is, the worker is alive."""
    if turn.fleet.workers[name].standing is Standing.ASIDE:
        take_back(turn, name)
    seen_s = turn.fleet.listened_s
    if isinstance(message, Beat):
        note_waiting(turn, name, message)
        turn.update_worker(name, beat=message, seen_s=seen_s)
    else:
        turn.update_worker(name, seen_s=seen_s)
    match message:
        case Beat():
            note_beat(turn, name, message)
        case Hello():
            note_hello(turn, name, message)
        case Held():
            note_held(turn, name, message)
        case Voted(vote=vote):
            note_voted(turn, name, vote)
        case Suspect():
            note_suspect(turn, name, message)
        case Saved(shard=shard):
            turn.update(saved_step=max(turn.fleet.saved_step, shard.step))
            turn.instructions.append(Collect(shard))
        case Unsaved(reason=reason):
            turn.instructions.append(Complain(name, reason))
        case Failed():
            note_failed(turn, name, message)
        case Leaving():
            note_leaving(turn, name)


def _conclude(turn: Transition) -> None:
    """Let the rules of each phase act until they have nothing more to say.

    This ends by construction. Another pass follows only if the last one has made something grow that cannot grow for
    ever: workers are lost, or go on in their life, or the phase goes on in its own; and a pass starts at most one
    generation, of which one event starts at most two. Whatever else a rule changes can wait for the next tick.
    """
    begun, before = len(turn.fleet.history), None
    while before is None or (before < _reached(turn.fleet) and len(turn.fleet.history) <= begun + 1):
        before = _reached(turn.fleet)
        _pass(turn)
        if isinstance(turn.fleet.phase, Ended):
            return
    if not isinstance(turn.fleet.phase, Finishing):
        spawn_missing(turn)


_PHASES = (Running, Stopping, Idle, Finishing, Ended)
"""In the order of a generation's life."""
_LIFE = tuple(Standing)
"""In the order of a worker's life."""


def _reached(fleet: Fleet) -> tuple[int, int, int, int]:
    """How far the run has come: between two generations each number has a bound, and the first to differ counts."""
    lived = sum(order * fleet.workers.count(standing) for order, standing in enumerate(_LIFE))
    return len(fleet.history), -len(fleet.workers), lived, _PHASES.index(type(fleet.phase))


def _pass(turn: Transition) -> None:
    """Each rule acts once."""
    if not isinstance(turn.fleet.phase, Ended):
        expire(turn)
        look_around(turn)
        reprieve(turn)
        readmit(turn)
        release(turn)
    match turn.fleet.phase:
        case (Idle() | Stopping()) as phase if turn.fleet.is_leaving:
            settle_leaving(turn, phase)
        case Idle() as phase:
            form(turn, phase)
        case Running() as phase:
            note_standstill(turn, phase)
            watch_generation(turn, phase)
            finish_if_all_left(turn)
            if turn.fleet.phase is phase:
                plan_ahead(turn, phase)
        case Stopping() as phase:
            settle(turn, phase)
        case Finishing() as phase:
            finish(turn, phase)
        case Ended():
            return
