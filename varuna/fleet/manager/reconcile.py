"""An agent is back, or new: what the state machine must hear, and which of its workers may not go on.

The manager may have been away, or have started again; the agent says everything that a manager must know which
remembers nothing but its journal.
"""

from dataclasses import dataclass

from varuna.core.messages import FromWorker, Hello, Suspect
from varuna.fleet.net.protocol import WorkerSnapshot
from varuna.fleet.state.fleet import Fleet, Running
from varuna.fleet.state.inputs import Event, MessageReceived, WorkerExited, WorkerSpawned


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """``node`` has these workers, and no others."""

    node: str
    charges: tuple[WorkerSnapshot, ...]


def node_of(worker: str) -> str:
    """``n3-box`` of ``n3-box.4``."""
    return worker.rpartition(".")[0]


def reunite(fleet: Fleet, lost: frozenset[str] | set[str], reunion: Reconciliation) -> tuple[list[Event], list[str]]:
    """Events for the state machine, in order, and workers to kill.

    Args:
        fleet: as it is now.
        lost: workers that this run has given up: they are fenced off and may not come back.
        reunion: who is there.
    """
    events: list[Event] = []
    fenced: list[str] = []
    for charge in reunion.charges:
        if charge.worker in lost:
            if charge.exited is None:
                fenced.append(charge.worker)
            continue
        if charge.worker not in fleet.workers:
            if charge.exited is not None:
                continue  # nobody waits for it
            events.append(WorkerSpawned(charge.worker, node=reunion.node))
        events.extend(MessageReceived(charge.worker, message) for message in charge.said)
        if charge.exited is not None:
            events.append(WorkerExited(charge.worker, charge.exited.code, charge.exited.stderr_tail))
        elif _missed_its_part(fleet, charge):
            reason = f"it was not told about generation {fleet.generation}, because the manager was away"
            events.append(MessageReceived(charge.worker, Suspect(generation=fleet.generation, reason=reason)))
    here = {charge.worker for charge in reunion.charges}
    gone = [name for name in fleet.workers.on(reunion.node) if name not in here]
    events.extend(WorkerExited(name, -9, "its agent was restarted") for name in gone)
    return events, fenced


def _missed_its_part(fleet: Fleet, charge: WorkerSnapshot) -> bool:
    """A member that never heard of the newest generation would keep all others waiting."""
    return isinstance(fleet.phase, Running) and fleet.is_member(charge.worker) and charge.generation < fleet.generation


def check_belongs(node: str, worker: str) -> None:
    """An agent speaks for its own workers only.

    Raises:
        ValueError: it is another's.
    """
    if node_of(worker) != node:
        raise ValueError(f"agent {node} speaks for worker {worker}")


def check_speaker(worker: str, message: FromWorker) -> None:
    """A worker speaks for itself only.

    Raises:
        ValueError: it does not.
    """
    if isinstance(message, Hello) and message.worker != worker:
        raise ValueError(f"worker {worker} claims to be {message.worker}")
