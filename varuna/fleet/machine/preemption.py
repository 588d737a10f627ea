"""Nodes that are about to leave: noted, left out of new plans, kept as sources of state, then let go."""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from varuna.core.messages import Finish
from varuna.core.node_notices import NodeNotice, Preemptible, PreemptionNotice, RebalanceAdvice, ZoneNotice
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.machines import Departure, Risk
from varuna.fleet.state.morph_gain import state_s, sums_s
from varuna.fleet.state.outputs import Release
from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.phases import Ended, Finishing, Running
from varuna.fleet.state.run_events import Answered, Asked
from varuna.fleet.state.worker import WorkerStatus, changed

# A node that outlives its deadline by this much has not been taken after all.
_REPRIEVE_S = 60.0
# A node that was given notice may go early: leave it this long before the last moment.
_MARGIN_S = 15.0
# A hand-over may take longer than the last ones did, by this factor.
_SLOWER = 1.5


class Way(Enum):
    """A way to leave nodes that are about to go."""

    STAY = auto()
    """Not yet: they are worth their seats."""
    AFTER_STEP = auto()
    """After the next vote: nothing is lost."""
    AT_ONCE = auto()
    """In the middle of the step, which cannot end before they go: its sums of gradients move with the state."""


def _note(transition: Transition, **changes: Any) -> None:
    """Replace what is known of machines."""
    transition.update(machines=changed(transition.fleet.machines, **changes))


def note_notice(transition: Transition, node: str, notice: NodeNotice) -> None:
    """Note what a cloud says of a node's place or future."""
    match notice:
        case PreemptionNotice():
            _note_preemption(transition, node, notice)
        case RebalanceAdvice(reason=reason):
            _note_risk(transition, node, reason)
        case Preemptible():
            _note_spot(transition, node)
        case ZoneNotice(zone=zone):
            _note_zone(transition, node, zone)


def _note_preemption(transition: Transition, node: str, notice: PreemptionNotice) -> None:
    """Note that a node will be taken away; of several deadlines the first counts."""
    departure = Departure(deadline_s=transition.now_s + notice.in_s, reason=notice.reason)
    _note_departure(transition, node, departure, f"in {notice.in_s:.0f} s")


def note_drain(transition: Transition, node: str) -> None:
    """Note that somebody wants a node back."""
    departure = Departure(deadline_s=float("inf"), reason="drained")
    if _note_departure(transition, node, departure, "as soon as its state is elsewhere"):
        transition.publish(Asked(what="drain", node=node))


def _note_departure(transition: Transition, node: str, departure: Departure, when: str) -> bool:
    """Note that a node will leave; returns whether that is news."""
    known = transition.fleet.machines.departing.get(node)
    if known is not None and known.deadline_s <= departure.deadline_s:
        return False
    _note(transition, departing={**transition.fleet.machines.departing, node: departure})
    transition.notice(f"node {node} will leave {when} ({departure.reason})", departs=True)
    return True


def _note_risk(transition: Transition, node: str, reason: str) -> None:
    """Note that a node may be taken away: it keeps its seats until spares on other nodes can have them."""
    if node not in transition.fleet.machines.at_risk:
        _note(transition, at_risk={**transition.fleet.machines.at_risk, node: Risk(reason)})
        then = "spares take its place once there are enough"
        transition.notice(f"node {node} may be taken away soon ({reason}): {then}", departs=True)


def _note_spot(transition: Transition, node: str) -> None:
    """Note that a node may be taken away at any time: until a run has seen losses itself, it plans for some."""
    before = transition.fleet.loss_rate
    expected = before.on_spot_machines(transition.now_s)
    if expected is not before:
        transition.update(loss_rate=expected)
        transition.notice(
            f"node {node} may be taken away at any time, says its cloud: plans are chosen for "
            f"{expected.planned_per_hour:.2g} losses of workers per hour, until this run has seen some"
        )


def _note_zone(transition: Transition, node: str, zone: str) -> None:
    """Note where a machine is; plans for its workers that were made without knowing it are made anew."""
    fleet = transition.fleet
    if fleet.machines.zones.get(node) == zone:
        return
    zones, here = fleet.machines.zones.with_item(node, zone), fleet.contacts.nodes or fleet.workers.nodes
    if len(zones) > 2 * len(here):  # machines that are gone are forgotten now and then
        zones = PersistentMap({name: where for name, where in zones.items() if name in here or name == node})
    _note(transition, zones=zones)
    if any(fleet.workers[name].is_joined for name in fleet.workers.on(node)):
        transition.ask_anew()


def note_replaced(transition: Transition, nodes: Iterable[str]) -> None:
    """Note that a morph to spares was asked for, because these nodes may be taken away."""
    at_risk = transition.fleet.machines.at_risk
    _note(transition, at_risk={**at_risk, **{node: replace(at_risk[node], replaced=True) for node in nodes}})


def leavers(fleet: Fleet) -> list[str]:
    """Ranks of the newest grid on nodes that are about to leave."""
    there = [name for node in fleet.machines.departing for name in fleet.workers.on(node)]
    going = [name for name in there if fleet.workers[name].seated and fleet.is_joined(name)]
    return sorted(going, key=fleet.record.ranks.__getitem__)


def way_out(fleet: Fleet, now_s: float) -> Way:
    """Choose how to leave the nodes that are about to go, by their earliest deadline.

    If the step in flight ends in time, and nothing but this asks for haste, its end is waited for: that is cheaper. If
    it cannot, or nobody knows, it goes on as long as there is time for state and sums to move, and is then broken off.
    """
    deadline_s = min(fleet.machines.departing[fleet.workers[name].node].deadline_s for name in leavers(fleet))
    if deadline_s == float("inf"):
        return Way.AFTER_STEP
    latest_s = deadline_s - hand_over_s(fleet)
    safe_s = latest_s - _MARGIN_S
    ends_s = step_ends_s(fleet)
    in_time = ends_s is not None and max(ends_s, now_s) < latest_s
    if now_s >= (latest_s if in_time or not fleet.is_settled else safe_s):
        return Way.AT_ONCE  # a generation that forms may be about to have everything in its new place
    is_last = ends_s is None or max(ends_s, now_s) + fleet.recorded.wall_s > safe_s
    return Way.AFTER_STEP if is_last or not in_time else Way.STAY


def step_ends_s(fleet: Fleet) -> float | None:
    """Return when the step in flight is expected to be committed; None if nobody knows."""
    return fleet.recorded.at_s + fleet.recorded.wall_s if fleet.formed and fleet.recorded.wall_s else None


def hand_over_s(fleet: Fleet) -> float:
    """From the decision to leave nodes until their state, and sums of gradients, are with others; rather too long."""
    assert fleet.job is not None
    job, plan = fleet.job, fleet.record.plan
    action_s = fleet.recorded.wall_s * plan.replicas / plan.micro_batches  # nothing interrupts one
    # Nobody may wait for optimizer state, which follows while others run: the leaver has to send it all the same.
    moving_s = max(fleet.experience.stall_s(job, plan), state_s(job, plan, fleet.speeds.link_bytes_per_s))
    return action_s + _SLOWER * (moving_s + sums_s(job, plan, fleet.speeds.link_bytes_per_s))


def release_leaving(transition: Transition) -> None:
    """Dismiss workers of leaving nodes once nobody needs them: they are neither in the grid nor sources of a morph."""
    for node in transition.fleet.machines.departing:
        fleet = transition.fleet
        there = [fleet.workers[name] for name in fleet.workers.on(node)]
        if any(worker.standing is WorkerStatus.LEFT for worker in there) or not _is_free(fleet, node):
            continue
        for worker in there:
            if worker.standing is WorkerStatus.JOINED:
                transition.send(worker.name, Finish())
                transition.update_worker(worker.name, standing=WorkerStatus.DISMISSED)
                if not fleet.config.replace:
                    transition.want_workers(-1)
        departing = transition.fleet.machines.departing
        if not departing[node].released:
            _note(transition, departing={**departing, node: replace(departing[node], released=True)})
            transition.instructions.append(Release(node, drained=departing[node].is_drain))
            if departing[node].is_drain:
                transition.publish(Answered(what="drain", node=node))


def _is_free(fleet: Fleet, node: str) -> bool:
    """Whether the run can do without all workers of a node."""
    match fleet.phase:
        case Running():
            there = [fleet.workers[name] for name in fleet.workers.on(node) if fleet.is_joined(name)]
            return not any(w.seated or (fleet.is_member(w.name) and not fleet.is_settled) for w in there)
        case Ended() | Finishing():
            return False  # they are dismissed with all others
        case _:
            return not fleet.history


def reprieve(transition: Transition) -> None:
    """Forget departures that are over: the node is gone, or was not taken. Forget risks of nodes that are gone."""
    fleet = transition.fleet
    if any(node not in fleet.contacts.nodes for node in fleet.machines.at_risk):
        at_risk = {node: risk for node, risk in fleet.machines.at_risk.items() if node in fleet.contacts.nodes}
        _note(transition, at_risk=at_risk)
    if not fleet.machines.departing:
        return
    kept = {
        node: departure
        for node, departure in fleet.machines.departing.items()
        if transition.now_s < departure.deadline_s + _REPRIEVE_S
        and (fleet.workers.on(node) or not departure.released or not departure.is_drain)
    }
    if kept != fleet.machines.departing:
        _note(transition, departing=kept)
