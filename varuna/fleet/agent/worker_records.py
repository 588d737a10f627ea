"""All workers of one agent: what is remembered of them, for whoever has to be told."""

import threading

from varuna.core.messages import Beat, FromWorker, ToWorker
from varuna.fleet.agent.worker_record import WorkerRecord
from varuna.fleet.net.protocol import Exited, WorkerSnapshot


class WorkerRecords:
    """Records by name; any thread may call every method: the connection's loop reads what the agent's thread writes.

    Args:
        kept: how many workers that have ended are remembered, in case the manager has not heard of them.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._records: dict[str, WorkerRecord] = {}

    def add(self, name: str) -> None:
        """Add a process that is about to start; the oldest ended ones are forgotten."""
        with self._lock:
            self._records[name] = WorkerRecord(name)
            ended = [each for each, record in self._records.items() if record.exited is not None]
            for old in ended[: -self._kept]:
                del self._records[old]

    def clear(self) -> None:
        """Forget all workers: another run begins."""
        with self._lock:
            self._records.clear()

    def has(self, name: str) -> bool:
        """Whether a worker is one of ours."""
        with self._lock:
            return name in self._records

    def hear(self, name: str, message: FromWorker) -> tuple[bool, bool]:
        """Take a worker's message; returns whether it is one of ours, and whether it has made progress."""
        with self._lock:
            record = self._records.get(name)
            return record is not None, record is not None and record.hear(message)

    def told(self, name: str, message: ToWorker) -> None:
        """Take a message of the manager to a worker."""
        with self._lock:
            if name in self._records:
                self._records[name].told(message)

    def broke_off(self, name: str) -> bool:
        """Whether a worker has had a seat, and has not left it: if its process ends, it was not done."""
        with self._lock:
            record = self._records.get(name)
            return record is not None and record.generation >= 0 and record.leaving is None

    def ended(self, name: str, exited: Exited) -> bool:
        """Note that a process ended; False if it is not one of ours, as after ``clear``."""
        with self._lock:
            if name not in self._records:
                return False
            self._records[name].exited = exited
            return True

    def all(self) -> list[WorkerRecord]:
        """All records, in the order in which the workers started."""
        with self._lock:
            return list(self._records.values())

    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        """Snapshots of all workers, for a manager that knows nothing."""
        with self._lock:
            return tuple(record.snapshot() for record in self._records.values())

    def beats(self) -> dict[str, Beat]:
        """The newest beat of each, if no pulse has carried it yet."""
        with self._lock:
            beats = {name: record.take_beat() for name, record in self._records.items()}
        return {name: beat for name, beat in beats.items() if beat is not None}
