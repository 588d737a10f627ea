"""Who can be heard, and what silence means. Leases judge nobody for a cable that is out.

Silence is measured on a clock of its own, ``Fleet.listened_s``. It stands still while the manager could not have heard
anybody: its process did not run, its door was not served, or, where workers are on other machines, nobody at all is
heard, for then it is the manager that is cut off. When somebody is back in contact, all leases begin anew.

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

from varuna.core.messages import Beat, Hold
from varuna.fleet.placement import uncovered
from varuna.fleet.state import Finishing, Fleet, Idle, Running, Stopping
from varuna.fleet.turn import Turn
from varuna.fleet.worker import Sight, Standing, Worker

# A manager that did not run for longer than this cannot tell whether a worker was silent in the meantime.
_STALL_S = 1.0
# Agents send a pulse a second: who is heard at all is heard within this time, and of several machines some one is.
_NEAR_S = 2.5
_ALONE_S = 3.0
# A wait is unusual if it is so many times longer than the longest that ended well.
_UNUSUAL = 1.5


def note_tick(turn: Turn, deaf_s: float) -> None:
    """Time passed; it counts as silence only if the manager could have heard something."""
    fleet = turn.fleet
    gap_s, was_alone = turn.now_s - fleet.ticked_s, fleet.is_alone
    deaf_s = max(deaf_s, gap_s if gap_s > _STALL_S else 0.0)
    is_alone = fleet.config.elastic and bool(fleet.workers) and turn.now_s - fleet.heard_s > _ALONE_S
    turn.update(ticked_s=turn.now_s, is_alone=is_alone)
    if is_alone:
        unheard_s = turn.now_s - fleet.heard_s
        if not fleet.told_alone and unheard_s > fleet.config.lease_s and not deaf_s:
            turn.update(told_alone=True)
            turn.notice(
                f"no machine has been heard for {unheard_s:.0f} s: either this manager is cut off, or all of them "
                "are gone. No worker is given up before a machine is heard",
                warning=True,
            )
    elif was_alone:
        _begin_anew(turn)
    else:
        turn.update(listened_s=fleet.listened_s + max(0.0, gap_s - deaf_s))


def _begin_anew(turn: Turn) -> None:
    """Somebody is back in contact: each of the others has a whole lease to come back."""
    fleet = turn.fleet
    if fleet.told_alone:
        turn.notice("machines are back in contact")
    now_s = fleet.listened_s
    turn.update(
        told_alone=False,
        regained_s=now_s,
        nodes={node: replace(sight, heard_s=now_s, parted=False, ended=False) for node, sight in fleet.nodes.items()},
        workers={name: replace(worker, seen_s=now_s) for name, worker in fleet.workers.items()},
    )


def hear(turn: Turn, node: str) -> None:
    """Something came from a machine; after a silence its workers have a whole lease to be heard, too."""
    fleet = turn.fleet
    if not fleet.config.elastic:
        return
    sight, now_s = fleet.nodes.get(node), fleet.listened_s
    turn.update(heard_s=turn.now_s, nodes={**fleet.nodes, node: Sight(heard_s=now_s)})
    if sight is not None and now_s - sight.heard_s > _NEAR_S:
        workers = turn.fleet.workers.items()
        turn.update(workers={name: replace(w, seen_s=now_s) if w.node == node else w for name, w in workers})
    if sight is not None and sight.told:
        turn.notice(f"node {node} is back in contact")


def note_parted(turn: Turn, node: str, *, abruptly: bool) -> None:
    """The connection to an agent ended; when all had been silent, that is what silence does to connections."""
    fleet = turn.fleet
    if node in fleet.nodes and fleet.listened_s > fleet.regained_s + fleet.config.lease_s:
        turn.update(nodes={**fleet.nodes, node: replace(fleet.nodes[node], parted=True, ended=abruptly)})


def note_beat(turn: Turn, name: str, beat: Beat) -> None:
    """A beat says how long its rank waits, and whether a step is done."""
    fleet, phase, before = turn.fleet, turn.fleet.phase, turn.fleet.workers[name].beat
    if not isinstance(phase, Running) or name not in fleet.record.grid or before is None:
        return
    if beat.generation != fleet.generation or before.generation != fleet.generation:
        return
    if fleet.formed and phase.longest_wait_s < before.waits_s > beat.waits_s:
        turn.update(phase=replace(phase, longest_wait_s=before.waits_s))
    if beat.step > before.step:
        note_progress(turn)


def note_progress(turn: Turn) -> None:
    """A step was committed: all ranks of the grid were alive, heard or not."""
    fleet = turn.fleet
    if not fleet.config.elastic:
        return
    alive = {name for name in fleet.record.grid if fleet.is_joined(name)}
    nodes = {fleet.workers[name].node for name in alive}
    turn.update(
        workers={
            name: replace(worker, seen_s=fleet.listened_s) if name in alive else worker
            for name, worker in fleet.workers.items()
        },
        nodes={
            node: replace(sight, parted=False, ended=False) if sight.parted and node in nodes else sight
            for node, sight in fleet.nodes.items()
        },
    )


def is_gone(fleet: Fleet, worker: Worker) -> bool:
    """Whether an agent's connection ended and a peer reports a broken link: not a cable, but a machine or an agent."""
    phase = fleet.phase
    suspected = isinstance(phase, Running | Stopping) and phase.suspicion is not None
    return suspected and worker.node in fleet.nodes and fleet.nodes[worker.node].parted


def look_around(turn: Turn) -> None:
    """Say who is out of sight, and put those aside without whom the others cannot go on."""
    fleet = turn.fleet
    if fleet.is_alone or not any(fleet.is_hidden(node) for node in fleet.nodes):
        return
    if not any(fleet.unheard_s(node) <= _NEAR_S for node in fleet.nodes):
        return  # soon it will be known that nobody is heard
    _forget_nodes(turn)
    away = [worker for name in turn.fleet.joined if _is_away(turn.fleet, worker := turn.fleet.workers[name])]
    match fleet.phase:
        case Running() as phase:
            _judge_running(turn, phase, away)
        case Idle() | Stopping():
            _put_aside(turn, away, "a generation has ended")
        case _:
            pass


def _forget_nodes(turn: Turn) -> None:
    """Say once who is out of sight; a machine without workers is not missed."""
    fleet = turn.fleet
    inhabited = {worker.node for worker in fleet.workers.values()}
    nodes = {node: sight for node, sight in fleet.nodes.items() if node in inhabited or not fleet.is_hidden(node)}
    for node in nodes:
        if fleet.is_hidden(node) and not nodes[node].told:
            nodes[node] = replace(nodes[node], told=True)
            turn.notice(f"node {node} is out of sight: it has not been heard for {fleet.unheard_s(node):.0f} s")
    if nodes != fleet.nodes:
        turn.update(nodes=nodes)


def _is_away(fleet: Fleet, worker: Worker) -> bool:
    """Whether a lease has passed since there was a sign that this worker lives, and its machine is out of sight."""
    return fleet.is_hidden(worker.node) and fleet.listened_s - worker.seen_s > fleet.config.lease_s


def _judge_running(turn: Turn, phase: Running, away: list[Worker]) -> None:
    """While a generation runs, only who holds it up is put aside; spares are forgotten after a long time."""
    fleet = turn.fleet
    needed = fleet.record.grid if fleet.formed else fleet.members
    missed = [worker for worker in away if worker.name in needed]
    for worker in away:
        if worker.name not in needed and fleet.unheard_s(worker.node) > fleet.config.return_s:
            turn.lose(worker.name, f"was out of sight for {fleet.config.return_s:.0f} s", kill=True)
    if not missed:
        return
    near = [w for name in fleet.record.grid if fleet.is_joined(name) and is_near(fleet, w := fleet.workers[name])]
    if near and not fleet.is_leaving:
        if stands_still(fleet, phase):
            _put_aside(turn, missed, "the step stands still")
            turn.update(causes=(*turn.fleet.causes, f"{_nodes(missed)} out of sight, and the step stood still"))
    elif not near and min(fleet.unheard_s(worker.node) for worker in missed) > return_patience_s(fleet):
        # Nobody is left who could say how the step fares.
        _put_aside(turn, missed, "all other ranks have left" if fleet.is_leaving else "so are all ranks")
        if not fleet.is_leaving:
            turn.update(causes=(*turn.fleet.causes, f"{_nodes(missed)} out of sight"))


def stands_still(fleet: Fleet, phase: Running) -> bool:
    """Whether every rank that is heard says that it waits for others, for longer than is usual."""
    grid = [fleet.workers[name] for name in fleet.record.grid if fleet.is_joined(name)]
    near = [worker for worker in grid if is_near(fleet, worker)]
    patience_s = _wait_patience_s(fleet, phase)
    return bool(near) and all(_waits_s(fleet, worker) >= patience_s for worker in near)


def is_near(fleet: Fleet, worker: Worker) -> bool:
    """Whether a worker's machine has just been heard."""
    return fleet.unheard_s(worker.node) <= _NEAR_S


def _waits_s(fleet: Fleet, worker: Worker) -> float:
    """For how long a rank has waited for its peers in the newest generation, by its own word."""
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
    """As long as doing the steps again would take that no checkpoint has, within bounds."""
    step_s = max(fleet.step_every_s, fleet.step_wall_s)
    again_s = max(0, fleet.recorded_step + 1 - fleet.saved_step) * step_s
    return max(fleet.config.lease_s, min(fleet.config.return_s, again_s))


def _put_aside(turn: Turn, workers: Iterable[Worker], why: str) -> None:
    workers = list(workers)
    if not workers:
        return
    for worker in workers:
        turn.update_worker(worker.name, standing=Standing.ASIDE, holding=None)
    named = " and ".join(worker.name for worker in workers)
    turn.notice(f"{_nodes(workers)} out of sight and {why}: {named} will be left out unless heard first", warning=True)


def _nodes(workers: Iterable[Worker]) -> str:
    nodes = sorted({worker.node for worker in workers})
    return f"node{'s' * (len(nodes) > 1)} {' and '.join(nodes)} {'are' if len(nodes) > 1 else 'is'}"


def take_back(turn: Turn, name: str) -> None:
    """Who was put aside is heard before anything was written down without it: it belongs to the run as before."""
    fleet, phase = turn.fleet, turn.fleet.phase
    turn.update_worker(name, standing=Standing.JOINED, holding=None)
    turn.notice(f"worker {name} is back in time")
    if isinstance(phase, Idle) and name in fleet.members:
        deadline_s = fleet.listened_s + fleet.config.hold_timeout_s
        turn.update(phase=Stopping(planned=phase.in_flight == 0, deadline_s=deadline_s))
    if name in fleet.members and not isinstance(phase, Finishing):
        turn.send(name, Hold(generation=fleet.generation))


def waits_for_return(turn: Turn, phase: Stopping | Idle) -> bool:
    """Whether those who were put aside may hold the state that nobody else does, and may still come back."""
    fleet = turn.fleet
    if not fleet.history or fleet.job is None:
        return False
    aside = [worker for name in fleet.record.grid if (worker := fleet.workers.get(name)) and _is_aside(worker)]
    aside = [worker for worker in aside if not is_dead(turn, worker)]
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
        turn.update(phase=replace(phase, waits=True))
        turn.notice(
            f"waiting at most {left_s:.0f} s for state that no other worker holds: {_nodes(aside)} out of sight",
            warning=True,
        )
    return True


def is_dead(turn: Turn, worker: Worker) -> bool:
    """Whether there is evidence, besides its silence, that a worker out of sight is no more."""
    fleet = turn.fleet
    notice, sight = fleet.departing.get(worker.node), fleet.nodes.get(worker.node)
    return (sight is not None and sight.ended) or (notice is not None and turn.now_s >= notice.deadline_s)


def _seat_sections(fleet: Fleet, name: str) -> frozenset[int]:
    """What a rank of the newest generation has."""
    plan = fleet.record.plan
    return frozenset(plan.sections_of(plan.place_of(fleet.record.grid.index(name)).stage))


def _is_aside(worker: Worker) -> bool:
    return worker.standing is Standing.ASIDE


def lose_aside(turn: Turn) -> None:
    """The next generation is about to be written down: who is still out of sight has no part in it."""
    for worker in list(turn.fleet.workers.values()):
        if _is_aside(worker):
            turn.lose(worker.name, "was out of sight when the run continued", kill=True)
