"""The condition of each worker, in a word and in words, for the page and the terminal. Pure."""

from statistics import median_low
from typing import Literal, NamedTuple

from varuna.core.plan import Plan
from varuna.core.units import counted, format_duration
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Finishing, Running
from varuna.fleet.state.worker import Worker

Kind = Literal["ok", "slow", "silent", "leaving", "wait"]
SHOWN_SLOW_RATIO = 1.25
PEERS = " the compute of its peers"


class Condition(NamedTuple):
    """The condition of a worker."""

    kind: Kind
    words: str


def condition(fleet: Fleet, worker: Worker, silent_s: float | None, slowness: float | None) -> Condition:
    """Condition of one worker.

    Args:
        fleet: the run.
        worker: one of its workers.
        silent_s: since it was heard; None if it never was.
        slowness: times the compute of its peers; None if that is not known.
    """
    if worker.node in fleet.machines.departing:
        return Condition("leaving", "its machine will leave")
    if fleet.contacts.is_alone or fleet.is_hidden(worker.node):
        return Condition("silent", "out of sight")
    if silent_s is not None and silent_s > fleet.config.lease_s / 2 and not isinstance(fleet.phase, Finishing):
        return Condition("silent", f"silent for {format_duration(silent_s)}")
    if not worker.is_joined:
        return Condition("wait", worker.standing.value)
    if slowness is not None and slowness > SHOWN_SLOW_RATIO:
        return Condition("slow", f"{slowness:.2f} times{PEERS}")
    if not worker.seated:
        return Condition("wait", why_idle(fleet, worker))
    return Condition("ok", "works")


def why_idle(fleet: Fleet, worker: Worker) -> str:
    """Say why a worker that has joined has no seat."""
    if not fleet.history:
        return "ready"
    if isinstance(fleet.phase, Running) and worker.name in fleet.phase.considered:
        return "to take it in would cost more than it brings"
    if not fleet.is_member(worker.name):
        return "it came after the plan was made"
    planned_for = {name: count for name, count in fleet.generations.planned_for.items() if count}
    if len(planned_for) > 1:
        whom = " and ".join(f"{count} {name or 'others'}" for name, count in planned_for.items())
    else:
        whom = counted(sum(planned_for.values()), "worker")
    return f"{fleet.record.plan.shape} is the best plan for {whom}"


def slowness(fleet: Fleet) -> dict[str, float]:
    """Compute of each seated worker, as a multiple of the median of its stage, where it is known.

    Of slow ones as it was found, of the others by the speed that is known of them.
    """
    if not fleet.history:
        return {}
    plan: Plan = fleet.record.plan
    found: dict[str, float] = {}
    for slot in plan.slots:
        names = [fleet.members[rank] for rank in slot.ranks]
        times = {name: fleet.workers[name].compute_s for name in names if name in fleet.workers}
        known = {name: compute_s * fleet.speed_of(name) for name, compute_s in times.items() if compute_s}
        if known:
            middle_s = median_low(known.values())
            found |= {name: compute_s / middle_s for name, compute_s in known.items()}
    return {**found, **{name: straggler.ratio for name, straggler in fleet.speeds.slow.items()}}
