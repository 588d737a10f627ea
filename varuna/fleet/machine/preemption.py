"""Nodes that are about to leave: noted, left out of new plans, kept as sources of state, then let go."""

from dataclasses import replace

from varuna.core.messages import Finish
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Departure, Ended, Finishing, Fleet, Risk, Running
from varuna.fleet.state.inputs import AdviceReceived, DrainRequested, NoticeReceived
from varuna.fleet.state.outputs import Release
from varuna.fleet.state.run_events import Answered, Asked
from varuna.fleet.state.worker import Standing

# A node that outlives its deadline by this much has not been taken after all.
_REPRIEVE_S = 60.0


def note_departure(transition: Transition, event: NoticeReceived | DrainRequested) -> None:
    """Note that a node will leave; of several deadlines the first counts."""
    if isinstance(event, NoticeReceived):
        departure = Departure(deadline_s=event.deadline_s, reason=event.reason)
        when = f"in {max(0.0, event.deadline_s - transition.now_s):.0f} s"
    else:
        departure = Departure(deadline_s=float("inf"), reason="drained")
        when = "as soon as its state is elsewhere"
    known = transition.fleet.departing.get(event.node)
    if known is not None and known.deadline_s <= departure.deadline_s:
        return
    transition.update(departing={**transition.fleet.departing, event.node: departure})
    if isinstance(event, DrainRequested):
        transition.publish(Asked(what="drain", node=event.node))
    transition.notice(f"node {event.node} will leave {when} ({departure.reason})")


def note_risk(transition: Transition, event: AdviceReceived) -> None:
    """Note that a node may be taken away: it keeps its seats until spares on other nodes can have them."""
    node, reason = event.node, event.reason
    if node not in transition.fleet.at_risk:
        transition.update(at_risk={**transition.fleet.at_risk, node: Risk(reason)})
        transition.notice(f"node {node} may be taken away soon ({reason}): spares take its place once there are enough")


def leavers(fleet: Fleet) -> list[str]:
    """Ranks of the newest grid on nodes that are about to leave."""
    there = [name for node in fleet.departing for name in fleet.workers.on(node)]
    going = [name for name in there if fleet.workers[name].seated and fleet.is_joined(name)]
    return sorted(going, key=fleet.record.ranks.__getitem__)


def release(transition: Transition) -> None:
    """Dismiss workers of leaving nodes once nobody needs them: they are neither in the grid nor sources of a morph."""
    for node in transition.fleet.departing:
        fleet = transition.fleet
        there = [fleet.workers[name] for name in fleet.workers.on(node)]
        if any(worker.standing is Standing.LEFT for worker in there) or not _is_free(fleet, node):
            continue
        for worker in there:
            if worker.standing is Standing.JOINED:
                transition.send(worker.name, Finish())
                transition.update_worker(worker.name, standing=Standing.DISMISSED)
        if not fleet.departing[node].released:
            departing = {**transition.fleet.departing, node: replace(fleet.departing[node], released=True)}
            transition.update(departing=departing)
            transition.instructions.append(Release(node, drained=departing[node].is_drain))
            if departing[node].is_drain:
                transition.publish(Answered(what="drain", node=node))


def _is_free(fleet: Fleet, node: str) -> bool:
    """Whether the run can do without all workers of a node."""
    match fleet.phase:
        case Running():
            there = [fleet.workers[name] for name in fleet.workers.on(node) if fleet.is_joined(name)]
            return not any(w.seated or (not fleet.formed and fleet.is_member(w.name)) for w in there)
        case Ended() | Finishing():
            return False  # they are dismissed with all others
        case _:
            return not fleet.history


def reprieve(transition: Transition) -> None:
    """Forget departures that are over: the node is gone, or was not taken. Forget risks of nodes that are gone."""
    fleet = transition.fleet
    if any(node not in fleet.nodes for node in fleet.at_risk):
        at_risk = {node: risk for node, risk in fleet.at_risk.items() if node in fleet.nodes}
        transition.update(at_risk=at_risk)
    if not fleet.departing:
        return
    kept = {
        node: departure
        for node, departure in fleet.departing.items()
        if transition.now_s < departure.deadline_s + _REPRIEVE_S
        and (fleet.workers.on(node) or not departure.released or not departure.is_drain)
    }
    if kept != fleet.departing:
        transition.update(departing=kept)
