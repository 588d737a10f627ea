"""Reconciles an agent that is back, or new, with the fleet: events for the state machine, and workers to kill.

The manager may have been away, or have started again; the agent says everything that a manager must know which
remembers nothing but its journal.
"""

from dataclasses import dataclass

from varuna.core.messages import FromWorker, Hello, Suspect
from varuna.fleet.net.protocol import WorkerSnapshot
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    Event,
    MessageReceived,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.phases import Running


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """``node`` has these workers, and no others."""

    node: str
    snapshots: tuple[WorkerSnapshot, ...]


def node_of(worker: str) -> str:
    """``n3-box`` of ``n3-box.4``."""
    return worker.rpartition(".")[0]


def reconcile(
    fleet: Fleet, lost: frozenset[str] | set[str], reconciliation: Reconciliation
) -> tuple[list[Event], list[str]]:
    """Events for the state machine, in order, and workers to kill.

    Args:
        fleet: as it is now.
        lost: workers that this run has given up: they are fenced off and may not come back.
        reconciliation: the workers that the agent has.
    """
    events: list[Event] = []
    fenced: list[str] = []
    for snapshot in reconciliation.snapshots:
        if snapshot.worker in lost:
            if snapshot.exited is None:
                fenced.append(snapshot.worker)
            continue
        if snapshot.worker not in fleet.workers:
            if snapshot.exited is not None:
                continue  # nobody waits for it
            events.append(WorkerSpawned(snapshot.worker, node=reconciliation.node))
        events.extend(MessageReceived(snapshot.worker, message) for message in snapshot.said)
        if snapshot.exited is not None:
            exited = snapshot.exited
            events.append(WorkerExited(snapshot.worker, exited.code, exited.stderr_tail, exited.is_oom))
        elif _missed_its_part(fleet, snapshot):
            reason = f"it was not told about generation {fleet.generation}, because the manager was away"
            events.append(MessageReceived(snapshot.worker, Suspect(generation=fleet.generation, reason=reason)))
    here = {snapshot.worker for snapshot in reconciliation.snapshots}
    gone = [name for name in fleet.workers.on(reconciliation.node) if name not in here]
    events.extend(WorkerExited(name, -9, "its agent was restarted") for name in gone)
    return events, fenced


def _missed_its_part(fleet: Fleet, snapshot: WorkerSnapshot) -> bool:
    """Return whether a member has never heard of the newest generation, and would keep all others waiting."""
    return (
        isinstance(fleet.phase, Running) and fleet.is_member(snapshot.worker) and snapshot.generation < fleet.generation
    )


def check_belongs(node: str, worker: str) -> None:
    """Check that an agent speaks for its own workers only.

    Raises:
        ValueError: it is another's.
    """
    if node_of(worker) != node:
        raise ValueError(f"agent {node} speaks for worker {worker}")


def check_speaker(worker: str, message: FromWorker) -> None:
    """Check that a worker speaks for itself only.

    Raises:
        ValueError: it does not.
    """
    if isinstance(message, Hello) and message.worker != worker:
        raise ValueError(f"worker {worker} claims to be {message.worker}")
