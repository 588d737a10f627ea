"""All workers of one agent: what is remembered of them, for whoever has to be told."""

import threading

from varuna.core.messages import Beat, FromWorker, ToWorker
from varuna.fleet.agent.worker_record import WorkerRecord
from varuna.fleet.net.protocol import Exited, WorkerSnapshot


class WorkerRecords:
    """Wards by name; every method may be called by any thread: the uplink's loop reads what the agent's thread writes.

    Args:
        kept: how many workers that have ended are remembered, in case the manager has not heard of them.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._records: dict[str, WorkerRecord] = {}

    def add(self, name: str) -> None:
        """A process is about to start; the oldest ends are forgotten."""
        with self._lock:
            self._records[name] = WorkerRecord(name)
            ended = [each for each, record in self._records.items() if record.exited is not None]
            for old in ended[: -self._kept]:
                del self._records[old]

    def clear(self) -> None:
        """Another run: none of them counts any more."""
        with self._lock:
            self._records.clear()

    def hear(self, name: str, message: FromWorker) -> tuple[bool, bool]:
        """A worker said something; whether it is one of ours, and whether it got on with its work."""
        with self._lock:
            record = self._records.get(name)
            return record is not None, record is not None and record.hear(message)

    def told(self, name: str, message: ToWorker) -> None:
        """The manager said something to a worker."""
        with self._lock:
            if name in self._records:
                self._records[name].told(message)

    def ended(self, name: str, exited: Exited) -> bool:
        """A process ended; False if it is none of ours, as after ``clear``."""
        with self._lock:
            if name not in self._records:
                return False
            self._records[name].exited = exited
            return True

    def all(self) -> list[WorkerRecord]:
        """In the order of their start."""
        with self._lock:
            return list(self._records.values())

    def charges(self) -> tuple[WorkerSnapshot, ...]:
        """Everything that a manager must hear which knows nothing."""
        with self._lock:
            return tuple(record.charge() for record in self._records.values())

    def beats(self) -> dict[str, Beat]:
        """The newest beat of each, if no pulse has carried it yet."""
        with self._lock:
            beats = {name: record.take_beat() for name, record in self._records.items()}
        return {name: beat for name, beat in beats.items() if beat is not None}
