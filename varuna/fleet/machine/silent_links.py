"""Two machines between which nothing gets through, though the manager hears both: one is left out for a while.

A switch, a firewall or a route parts them, so the next generation would stand still as well, or not form at all. A rank
says which other one it cannot reach, and is believed so far as it is the one to leave, unless a second machine says so
of the same one. If the others do not have all state without the one, and do without the other, that one leaves; if they
need both, the generation forms once more first.
"""

from collections import Counter
from collections.abc import Iterable

from varuna.fleet.machine.leases import is_near
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.machines import Silence
from varuna.fleet.state.worker import changed

_TIMES = 2
"""Generations that two machines may break whose state is with nobody else."""


def note_unreachable(transition: Transition, name: str, peer: int) -> None:
    """Note that a member gets nothing through to the rank ``peer`` of the newest generation."""
    fleet = transition.fleet
    if not fleet.config.elastic or peer >= len(fleet.members):
        return
    other = fleet.workers.get(fleet.members[peer])
    node = fleet.workers[name].node
    if other is None or other.node == node:
        return
    before = fleet.machines.silences.get((node, other.node))
    if before is None or before.generation < fleet.generation:
        times = 1 if before is None else before.times + 1
        silence = Silence(worker=name, other=other.name, times=times, generation=fleet.generation)
        silences = {**fleet.machines.silences, (node, other.node): silence}
        transition.update(machines=changed(fleet.machines, silences=silences))


def lose_parted_machines(transition: Transition) -> None:
    """Lose the workers of machines that cannot reach others, so that no two that are left are parted."""
    while (found := _who_leaves(transition.fleet)) is not None:
        node, other = found
        for name in transition.fleet.workers.on(node):
            if transition.fleet.workers[name].is_joined:
                transition.lose_worker(name, f"cannot reach node {other}, though both are heard", kill=True, rests=True)
        transition.notice(
            f"nothing gets through between nodes {node} and {other}, though both are heard: node {node} is left out "
            "for a minute, then twice as long each time. Look for a firewall, a switch or a route between them",
            warning=True,
        )


def forget_links(transition: Transition) -> None:
    """Forget silent links, since a generation trains: all in it reach each other."""
    if transition.fleet.machines.silences:
        transition.update(machines=changed(transition.fleet.machines, silences={}))


def _who_leaves(fleet: Fleet) -> tuple[str, str] | None:
    """A machine that leaves, and whom it cannot reach; of several, the one that is cut off from the most."""
    pairs = [
        pair
        for pair, silence in fleet.machines.silences.items()
        if silence.generation == fleet.generation and _is_there(fleet, silence.worker, silence.other)
    ]
    ends = [end for pair in pairs for end in pair]
    accused = Counter(other for _, other in pairs)
    found = []
    for node, other in pairs:
        first, second = (other, node) if accused[other] > 1 else (node, other)
        if _is_needed(fleet, first) and not _is_needed(fleet, second):
            first, second = second, first
        if not _is_needed(fleet, first) or fleet.machines.silences[node, other].times >= _TIMES:
            found.append((first, second))
    return max(found, key=lambda each: (ends.count(each[0]), each), default=None)


def _is_there(fleet: Fleet, *names: str) -> bool:
    """Return whether workers take part and are heard: one that is dead is no matter of the network."""
    return all(fleet.is_joined(name) and is_near(fleet, fleet.workers[name]) for name in names)


def _is_needed(fleet: Fleet, node: str) -> bool:
    """Return whether this machine alone has a section's state, by the newest generation that trained."""
    record = next((each for each in reversed(fleet.history) if each.recovery_seconds is not None), None)
    if record is None:
        return False

    def sections(names: Iterable[str]) -> set[int]:
        seated = (name for name in names if record.has_seat(name) and fleet.is_joined(name))
        return {section for name in seated for section in record.plan.sections_at(record.ranks[name])}

    there = set(fleet.workers.on(node))
    return bool(sections(there) - sections(name for name in record.grid if name not in there))
