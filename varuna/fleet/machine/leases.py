"""Leases: who can be heard, and what silence means. A broken network alone makes nobody count as dead.

Silence is measured on a clock of its own, ``Contacts.listened_s``. It stands still while the manager could not have
heard anybody: its process did not run, its server stood still, or, where workers are on other machines, nobody at all
is heard, for then it is the manager that is cut off. When somebody is back in contact, all leases begin anew.

- A worker is **frozen** if its own machine is heard for a lease without it.
- A machine that is not heard for a lease is **out of sight**. A committed step proves that all its members live, so
  while steps go on nothing follows from that.
- Its workers are **put aside** if the members that are heard say that the step stands still. The generation ends, and
  whoever is heard before the next one is written down is taken back as it is. Then they are lost, and fenced off.
- State that nobody else holds is waited for, as long as doing it again would take; not, if those who have it are dead:
  if their agent says so, or its connection was ended by its system, or a notice said that the machine goes.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from varuna.core.messages import Beat, Hold
from varuna.fleet.machine.placement import uncovered
from varuna.fleet.machine.recall import in_memory
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import Ending
from varuna.fleet.state.contacts import NodeContact, ReachabilityScan
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.phases import Finishing, Idle, Running, Stopping
from varuna.fleet.state.run_events import GenerationRecord
from varuna.fleet.state.stutter import NO_EVIDENCE
from varuna.fleet.state.worker import Worker, WorkerInventory, WorkerStatus, changed
from varuna.fleet.state.workers import Workers

# A manager that did not run for longer than this cannot tell whether a worker was silent in the meantime.
_STALL_S = 1.0
# Agents send a pulse a second: who is heard at all is heard within this time, and of several machines some one is.
_NEAR_S = 2.5
_ALONE_S = 3.0
# Those without whom the step may stand still are looked at this often, as long as a rank that is heard is at work.
_LOOK_AGAIN_S = 1.0
# A wait is unusual if it is this many times longer than the longest that ended well; which counts for half after
# 20 steps, so that one hiccup of the network does not make a later loss slow.
_UNUSUAL = 1.5
_FORGETS = 0.5 ** (1 / 20)


def _note(transition: Transition, **changes: Any) -> None:
    """Replace fields of the contacts."""
    fleet = transition.fleet
    transition.fleet = changed(fleet, contacts=changed(fleet.contacts, **changes))


def _note_of_node(transition: Transition, node: str, contact: NodeContact) -> None:
    """Replace what is known of a machine."""
    _note(transition, nodes=transition.fleet.contacts.nodes.with_item(node, contact))


def note_tick(transition: Transition, deaf_s: float) -> None:
    """Note that time passed; it counts as silence only if the manager could have heard something."""
    fleet = transition.fleet
    gap_s, was_alone = transition.now_s - fleet.contacts.ticked_s, fleet.contacts.is_alone
    deaf_s = max(deaf_s, gap_s if gap_s > _STALL_S else 0.0)
    is_alone = fleet.config.elastic and bool(fleet.workers) and transition.now_s - fleet.contacts.heard_s > _ALONE_S
    heard_s = 0.0 if is_alone or was_alone else max(0.0, gap_s - deaf_s)
    _note(transition, ticked_s=transition.now_s, is_alone=is_alone, listened_s=fleet.listened_s + heard_s)
    if is_alone:
        unheard_s = transition.now_s - fleet.contacts.heard_s
        if not fleet.contacts.isolation_reported and unheard_s > fleet.config.lease_s and not deaf_s:
            _note(transition, isolation_reported=True)
            transition.notice(
                f"no machine has been heard for {unheard_s:.0f} s: either this manager is cut off, or all of them "
                "are gone. No worker is given up before a machine is heard",
                warning=True,
            )
    elif was_alone:  # nobody is left to be heard
        _begin_anew(transition)


def _begin_anew(transition: Transition) -> None:
    """Give each machine a whole lease to come back, since one is back in contact."""
    fleet = transition.fleet
    if fleet.contacts.isolation_reported:
        transition.notice("machines are back in contact")
    now_s = fleet.listened_s
    heard = {node: NodeContact(heard_s=now_s, told=sight.told) for node, sight in fleet.contacts.nodes.items()}
    transition.update(workers=Workers(changed(worker, seen_s=now_s) for worker in fleet.workers.values()))
    _note(
        transition,
        is_alone=False,
        isolation_reported=False,
        regained_s=now_s,
        nodes=PersistentMap(heard),
        hidden=PersistentMap(),
        nearest_s=now_s,
        hiding_s=now_s + fleet.config.lease_s,
    )


def record_contact(transition: Transition, node: str) -> None:
    """Note that something came from a machine; after a silence its workers get a whole lease to be heard, too."""
    fleet = transition.fleet
    if not fleet.config.elastic:
        return
    if fleet.contacts.is_alone:
        _begin_anew(transition)
        fleet = transition.fleet
    contacts = fleet.contacts
    sight, now_s = contacts.nodes.get(node), contacts.listened_s
    if sight is not None and sight.heard_s == now_s and sight.parted_after is None:
        _note(transition, heard_s=transition.now_s)
        return
    nodes = contacts.nodes.with_item(node, NodeContact(heard_s=now_s))
    _note(transition, heard_s=transition.now_s, nearest_s=now_s, nodes=nodes)
    is_back = sight is not None and now_s - sight.heard_s > _NEAR_S
    for name in fleet.workers.on(node):
        if is_back:
            transition.update_worker(name, seen_s=now_s)
        elif now_s - fleet.seen_s(fleet.workers[name]) > fleet.config.suspect_lease_s:
            transition.watch_worker(name)
    if sight is not None and sight.told:
        transition.notice(f"node {node} is back in contact")
    if node in contacts.hidden:
        _note(transition, hidden=contacts.hidden.without(node))


def hear_all(transition: Transition, nodes: Iterable[str], workers: Iterable[str]) -> None:
    """Note that machines and workers live which say nothing new: in one change, those that are heard all the time."""
    if transition.fleet.contacts.is_alone:
        _begin_anew(transition)
    usual = []
    for node in nodes:
        if _is_heard_all_the_time(transition.fleet, node):
            usual.append(node)
        else:
            record_contact(transition, node)
    known = [name for name in workers if name in transition.fleet.workers]  # the lost are not heard any more
    for name in known:
        if transition.fleet.workers[name].standing is WorkerStatus.UNREACHABLE:
            readmit_worker(transition, name)
    fleet, contacts, now_s = transition.fleet, transition.fleet.contacts, transition.fleet.listened_s
    if usual:
        heard = contacts.nodes.with_values(dict.fromkeys(usual, NodeContact(heard_s=now_s)))
        contacts = changed(contacts, heard_s=transition.now_s, nearest_s=now_s, nodes=heard)
    transition.update(workers=fleet.workers.seen(known, now_s), contacts=contacts)


def _is_heard_all_the_time(fleet: Fleet, node: str) -> bool:
    """Return whether a word from a machine changes nothing but when it was heard."""
    contacts = fleet.contacts
    sight, now_s = contacts.nodes.get(node), contacts.listened_s
    if sight is None or sight.told or now_s - sight.heard_s > _NEAR_S or node in contacts.hidden:
        return False
    return all(now_s - fleet.workers[name].seen_s <= fleet.config.suspect_lease_s for name in fleet.workers.on(node))


def note_parted(transition: Transition, node: str, *, abruptly: bool) -> None:
    """Note that an agent's connection ended; after a silence of all agents this says nothing about it."""
    fleet = transition.fleet
    if node in fleet.contacts.nodes and fleet.listened_s > fleet.contacts.regained_s + fleet.config.lease_s:
        sight = replace(fleet.contacts.nodes[node], parted_after=fleet.contacts.progresses, ended=abruptly)
        _note_of_node(transition, node, sight)
        transition.look_at_all()


def note_beat(transition: Transition, name: str, beat: Beat) -> None:
    """Note how long a rank waits and whether a step is done, from its beat."""
    fleet, phase, before = transition.fleet, transition.fleet.phase, transition.fleet.workers[name].beat
    if not isinstance(phase, Running) or before is None or not fleet.workers[name].seated:
        return
    if beat.generation != fleet.generation or before.generation != fleet.generation:
        return
    if fleet.formed and phase.longest_wait_s < before.waits_s > beat.waits_s:
        transition.update(phase=replace(phase, longest_wait_s=before.waits_s))
    if beat.step > before.step:
        note_progress(transition)


def forget_waits(transition: Transition) -> None:
    """Let a step that was recorded make long waits of earlier ones count for less."""
    phase = transition.fleet.phase
    if isinstance(phase, Running) and phase.longest_wait_s:
        transition.update(phase=replace(phase, longest_wait_s=_FORGETS * phase.longest_wait_s))


def note_progress(transition: Transition) -> None:
    """Note a committed step, which proves that all ranks of the grid were alive, heard or not."""
    fleet = transition.fleet
    if fleet.config.elastic:
        _note(transition, progressed_s=fleet.listened_s, progresses=fleet.contacts.progresses + 1)


def begin_progress(fleet: Fleet, record: GenerationRecord) -> dict[str, object]:
    """Changes for a new generation: what the steps of the old one have proved is noted for each worker.

    Whoever has no part in it is like a newcomer, for what it holds is old after the next step.
    """
    return {
        "workers": Workers(
            changed(
                worker,
                holding=WorkerInventory() if worker.is_joined and worker.name not in record.ranks else None,
                seated=record.has_seat(worker.name),
                seen_s=fleet.seen_s(worker),
                compute_s=None,
                speed_adjusted_s=None,
                evidence=NO_EVIDENCE,
                lead=NO_EVIDENCE,
                recent_s=(),
            )
            for worker in fleet.workers.values()
        ),
        "contacts": changed(
            fleet.contacts.unproved(),
            nodes=PersistentMap(
                {
                    node: sight if sight.parted_after is None else _as_known(fleet, node)
                    for node, sight in fleet.contacts.nodes.items()
                }
            ),
        ),
    }


def _as_known(fleet: Fleet, node: str) -> NodeContact:
    """Return what is known of a machine, without a look at the steps that have shown it."""
    is_parted = fleet.is_parted(node)
    sight = fleet.contacts.nodes[node]
    return replace(
        sight, parted_after=fleet.contacts.progresses if is_parted else None, ended=is_parted and sight.ended
    )


def is_gone(fleet: Fleet, worker: Worker) -> bool:
    """Return whether an agent's connection ended and a peer reports a broken link: so it is no cable."""
    phase = fleet.phase
    suspected = isinstance(phase, Running | Stopping) and phase.suspicion is not None
    return suspected and fleet.is_parted(worker.node)


def check_reachability(transition: Transition) -> None:
    """Say who is out of sight, and put those aside without whom the others cannot go on.

    Machines out of sight are looked at when what they mean may have changed: more of them are, another phase or
    generation has begun, or time is up for one of their workers.
    """
    _find_hidden(transition)
    fleet = transition.fleet
    if fleet.contacts.is_alone or not fleet.contacts.hidden:
        return
    if fleet.listened_s - fleet.contacts.nearest_s > _NEAR_S:
        return  # soon it will be known that nobody is heard
    phase, looked = fleet.phase, fleet.contacts.looked
    if fleet.listened_s <= looked.until_s and looked.generation == fleet.generation and isinstance(phase, looked.phase):
        return
    _report_hidden(transition)
    there = [fleet.workers[name] for node in sorted(fleet.contacts.hidden) for name in fleet.workers.on(node)]
    there = [worker for worker in there if worker.is_joined]
    away = [worker for worker in there if _is_away(fleet, worker)]
    until_s = (
        min((fleet.seen_s(w) for w in there if not _is_away(fleet, w)), default=float("inf")) + fleet.config.lease_s
    )
    match phase:
        case Running():
            until_s = min(until_s, _judge_running(transition, phase, away))
        case Idle() | Stopping():
            _put_aside(transition, away, "a generation has ended")
        case _:
            pass
    _note(transition, looked=ReachabilityScan(until_s=until_s, generation=fleet.generation, phase=type(phase)))


def _find_hidden(transition: Transition) -> None:
    """Look at all machines when one of them may have got out of sight, which none can before a lease is over."""
    fleet = transition.fleet
    if fleet.contacts.is_alone or fleet.listened_s <= fleet.contacts.hiding_s:
        return
    hidden = PersistentMap({node: None for node in fleet.contacts.nodes if fleet.is_hidden(node)})
    oldest_s = min(
        (s.heard_s for node, s in fleet.contacts.nodes.items() if node not in hidden), default=fleet.listened_s
    )
    _note(transition, hidden=hidden, hiding_s=oldest_s + fleet.config.lease_s, looked=ReachabilityScan())


def _report_hidden(transition: Transition) -> None:
    """Report once who is out of sight; a machine without workers does not matter."""
    fleet = transition.fleet
    for node in sorted(fleet.contacts.hidden):
        if not fleet.workers.on(node):
            transition.forget_node(node)
        elif not fleet.contacts.nodes[node].told:
            _note_of_node(transition, node, replace(fleet.contacts.nodes[node], told=True))
            transition.notice(f"node {node} is out of sight: it has not been heard for {fleet.unheard_s(node):.0f} s")


def _is_away(fleet: Fleet, worker: Worker) -> bool:
    """Return whether a lease has passed since the last sign of a worker whose machine is out of sight."""
    return fleet.listened_s - fleet.seen_s(worker) > fleet.config.lease_s


def _judge_running(transition: Transition, phase: Running, away: list[Worker]) -> float:
    """While a generation runs, only who holds it up is put aside; spares are forgotten after a long time.

    Returns until when, on the clock for silence, nothing follows from those that are away.
    """
    fleet = transition.fleet
    missed = [worker for worker in away if worker.seated or (fleet.is_member(worker.name) and not fleet.is_settled)]
    names = {worker.name for worker in missed}
    spares = [worker for worker in away if worker.name not in names]
    for worker in spares:
        if fleet.unheard_s(worker.node) > fleet.config.return_s:
            transition.lose_worker(worker.name, f"was out of sight for {fleet.config.return_s:.0f} s", kill=True)
    if not missed:
        due_s = (fleet.config.return_s - fleet.unheard_s(worker.node) for worker in spares)
        return fleet.listened_s + min((each_s for each_s in due_s if each_s >= 0), default=float("inf"))
    near = any(fleet.is_joined(name) and is_near(fleet, fleet.workers[name]) for name in fleet.record.grid)
    if near and not fleet.is_leaving:
        if left_s := _still_in_s(fleet, phase):
            return fleet.listened_s + min(left_s - _NEAR_S, _LOOK_AGAIN_S)
        _put_aside(transition, missed, "the step stands still")
        transition.note_cause(Ending.HIDDEN, f"{_nodes(missed)} out of sight, and the step stood still")
    elif not near and min(fleet.unheard_s(worker.node) for worker in missed) > return_patience_s(fleet):
        # Nobody is left who could say how the step fares.
        _put_aside(transition, missed, "all other ranks have left" if fleet.is_leaving else "so are all ranks")
        if not fleet.is_leaving:
            transition.note_cause(Ending.HIDDEN, f"{_nodes(missed)} out of sight")
    return float("-inf")


def stands_still(fleet: Fleet, phase: Running) -> bool:
    """Return whether every rank that is heard says that it waits for others, for longer than is usual."""
    return _still_in_s(fleet, phase) == 0


def _still_in_s(fleet: Fleet, phase: Running) -> float:
    """Zero if the step stands still; else for how long a rank that is heard must still wait, infinite if none is.

    Its heartbeat may be late, by as long as a machine counts as near.
    """
    patience_s, left_s = _wait_patience_s(fleet, phase), float("inf")
    for name in fleet.record.grid:
        if fleet.is_joined(name) and is_near(fleet, worker := fleet.workers[name]):
            left_s = max(0.0, patience_s - _waits_s(fleet, worker))
            if left_s:
                return left_s
    return left_s


def is_near(fleet: Fleet, worker: Worker) -> bool:
    """Return whether a worker's machine has just been heard."""
    return fleet.unheard_s(worker.node) <= _NEAR_S


def _waits_s(fleet: Fleet, worker: Worker) -> float:
    """Seconds for which a rank says that it has waited for its peers in the newest generation."""
    beat = worker.beat
    return beat.waits_s if beat is not None and beat.generation == fleet.generation else 0.0


def _wait_patience_s(fleet: Fleet, phase: Running) -> float:
    """A step stands still if all wait for longer than a lease, and than anybody waits as a rule."""
    lease_s = fleet.config.lease_s
    if fleet.formed:
        return max(lease_s, _UNUSUAL * phase.longest_wait_s)
    assert fleet.job is not None
    return lease_s + 2 * fleet.experience.stall_s(fleet.job, fleet.record.plan)  # state may be on its way


def return_patience_s(fleet: Fleet) -> float:
    """Seconds that doing the steps again would take that no checkpoint has, also none in memory, within bounds."""
    step_s = max(fleet.recorded.every_s, fleet.recorded.wall_s)
    kept_step = max([fleet.recorded.saved_step, *(each.step for each in in_memory(fleet, fleet.joined))])
    again_s = max(0, fleet.recorded.step + 1 - kept_step) * step_s
    return max(fleet.config.lease_s, min(fleet.config.return_s, again_s))


def _put_aside(transition: Transition, workers: Iterable[Worker], why: str) -> None:
    workers = list(workers)
    if not workers:
        return
    for worker in workers:
        fleet = transition.fleet
        if worker.node in fleet.contacts.nodes:
            _note_of_node(transition, worker.node, _as_known(fleet, worker.node))
        transition.update_worker(
            worker.name, standing=WorkerStatus.UNREACHABLE, holding=None, seen_s=fleet.seen_s(worker)
        )
    transition.hasten()
    named = " and ".join(worker.name for worker in workers)
    transition.notice(
        f"{_nodes(workers)} out of sight and {why}: {named} will be left out unless heard first", warning=True
    )


def _nodes(workers: Iterable[Worker]) -> str:
    nodes = sorted({worker.node for worker in workers})
    return f"node{'s' * (len(nodes) > 1)} {' and '.join(nodes)} {'are' if len(nodes) > 1 else 'is'}"


def readmit_worker(transition: Transition, name: str) -> None:
    """Take back a worker that was put aside, if nothing was written down without it yet."""
    fleet, phase = transition.fleet, transition.fleet.phase
    holding = None if fleet.is_member(name) else WorkerInventory()
    transition.update_worker(name, standing=WorkerStatus.JOINED, holding=holding)
    transition.notice(f"worker {name} is back in time")
    if isinstance(phase, Idle) and fleet.is_member(name):
        deadline_s = fleet.listened_s + fleet.config.hold_timeout_s
        transition.update(phase=Stopping(planned=phase.in_flight == 0, deadline_s=deadline_s))
    if fleet.is_member(name) and not isinstance(phase, Finishing):
        transition.send(name, Hold(generation=fleet.generation))


def awaits_return(transition: Transition, phase: Stopping | Idle) -> bool:
    """Return whether those who were put aside may hold the state that nobody else does, and may still come back."""
    fleet = transition.fleet
    if not fleet.history or fleet.job is None:
        return False
    aside = [worker for name in fleet.record.grid if (worker := fleet.workers.get(name)) and _is_aside(worker)]
    aside = [worker for worker in aside if not is_dead(transition, worker)]
    held = {name: worker.holding.sections for name, worker in fleet.workers.items() if worker.holding is not None}
    sections = len(fleet.job.model.sections)
    if not aside or not uncovered(sections, held):
        return False
    if fleet.formed and uncovered(
        sections, {**held, **{worker.name: _seat_sections(fleet, worker.name) for worker in aside}}
    ):
        return False  # what the dead took with them, nobody brings back
    left_s = return_patience_s(fleet) - min(fleet.unheard_s(worker.node) for worker in aside)
    if left_s <= 0:
        return False
    if not phase.waits:
        transition.update(phase=replace(phase, waits=True))
        transition.notice(
            f"waiting at most {left_s:.0f} s for state that no other worker holds: {_nodes(aside)} out of sight",
            warning=True,
        )
    return True


def is_dead(transition: Transition, worker: Worker) -> bool:
    """Return whether there is evidence, besides its silence, that a worker out of sight is dead."""
    fleet = transition.fleet
    notice, sight = fleet.machines.departing.get(worker.node), fleet.contacts.nodes.get(worker.node)
    return (sight is not None and sight.ended and fleet.is_parted(worker.node)) or (
        notice is not None and transition.now_s >= notice.deadline_s
    )


def _seat_sections(fleet: Fleet, name: str) -> frozenset[int]:
    """Sections of a rank of the newest generation."""
    plan = fleet.record.plan
    return frozenset(plan.sections_at(fleet.record.ranks[name]))


def _is_aside(worker: Worker) -> bool:
    return worker.standing is WorkerStatus.UNREACHABLE


def drop_unreachable(transition: Transition) -> None:
    """Lose workers that are still out of sight, since the next generation is about to be written down without them."""
    if transition.fleet.workers.count(WorkerStatus.UNREACHABLE):
        for worker in list(transition.fleet.workers.values()):
            if _is_aside(worker):
                transition.lose_worker(worker.name, "was out of sight when the run continued", kill=True)
