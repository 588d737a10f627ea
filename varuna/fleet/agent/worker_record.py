"""An agent's memory of a worker, so that a manager which knows nothing can be told everything that counts."""

import threading
from collections import deque
from dataclasses import dataclass, field

from varuna.core.messages import (
    Assign,
    Beat,
    Failed,
    FromWorker,
    Hello,
    Leaving,
    Recorded,
    Saved,
    StopReport,
    Suspect,
    ToWorker,
    Voted,
)
from varuna.core.times import merged
from varuna.fleet.net.protocol import Exited, WorkerSnapshot

_VOTES_KEPT = 16_384
"""Most unrecorded steps that are kept while the manager is away; all but the newest take a few numbers each."""
_SAVES_KEPT = 2
"""Checkpoints whose shards are remembered: nobody says here which ones are complete, and the next may be under way."""


@dataclass
class WorkerRecord:
    """One worker, from the start of its process until the manager knows of its end."""

    name: str
    generation: int = -1
    step: int = 0
    earlier: tuple[FromWorker, ...] = ()
    """Of the script's training before this one, until the manager has begun this one."""
    hello: Hello | None = None
    beat: Beat | None = None
    """The newest beat that no pulse has carried yet; each is sent once, so that silence shows."""
    votes: deque[Voted] = field(default_factory=lambda: deque(maxlen=_VOTES_KEPT))
    saved: tuple[Saved, ...] = ()
    """Shards of the newest checkpoints: a manager that starts again knows of none that is not complete."""
    suspect: Suspect | None = None
    held: StopReport | None = None
    leaving: Leaving | None = None
    failed: Failed | None = None
    exited: Exited | None = None

    def note_from_worker(self, message: FromWorker) -> bool:
        """Take a worker's message; returns whether the worker has made progress."""
        step_before = self.step
        match message:
            case Hello():
                if self.hello is not None and message.training > self.hello.training:
                    self._begin_training()
                self.hello = message
            case Beat():
                self.beat, self.step = _joined(self.beat, message), max(self.step, message.step)
            case Voted():
                if self.votes:
                    self.votes[-1] = Voted(vote=self.votes[-1].vote.shortened())
                self.votes.append(message)
            case Suspect():
                self.suspect = message
            case StopReport():
                self.held, self.suspect = message, None
            case Leaving():
                self.leaving = message
            case Failed():
                self.failed = message
            case Saved():
                kept = sorted({message.shard.step, *(saved.shard.step for saved in self.saved)})[-_SAVES_KEPT:]
                self.saved = tuple(saved for saved in (*self.saved, message) if saved.shard.step in kept)
        return self.step > step_before

    def _begin_training(self) -> None:
        """The worker begins the script's next training; that the one before is over, a manager may not have heard."""
        said = (self.hello, *self.saved, *self.votes, self.leaving)
        self.earlier = tuple(message for message in said if message is not None)
        self.votes.clear()
        self.saved, self.step = (), 0
        self.suspect = self.held = self.leaving = None

    def note_from_manager(self, message: ToWorker) -> None:
        """Take a message of the manager to the worker."""
        match message:
            case Assign(assignment=assignment):
                self.generation, self.held, self.suspect, self.earlier = assignment.generation, None, None, ()
                if not assignment.goes_on:
                    self.votes.clear()
                    self.saved = ()
            case Recorded(step=step):
                while self.votes and self.votes[0].vote.step <= step:
                    self.votes.popleft()
            case _:
                pass

    def snapshot(self) -> WorkerSnapshot:
        """Everything that counts, in the order in which it has to be heard."""
        said = (
            *(*self.earlier, self.hello, *self.saved, *self.votes),
            *(self.suspect, self.held, self.leaving, self.failed),
        )
        return WorkerSnapshot(
            worker=self.name,
            said=tuple(message for message in said if message is not None),
            generation=self.generation,
            exited=self.exited,
        )

    def take_beat(self) -> Beat | None:
        """The newest beat, if it was not taken before."""
        beat, self.beat = self.beat, None
        return beat


def _joined(before: Beat | None, beat: Beat) -> Beat:
    """Merge two beats: the measurements of the older one travel with the newer."""
    if before is None or before.generation != beat.generation:
        return beat
    changes: dict[str, object] = {}
    if before.times is not None:
        changes["times"] = before.times if beat.times is None else merged([before.times, beat.times])
    if beat.forward_s is None:
        changes |= {"forward_s": before.forward_s, "backward_s": before.backward_s}
    return beat.model_copy(update=changes)


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
        """Return whether this agent has started a worker."""
        with self._lock:
            return name in self._records

    def note_from_worker(self, name: str, message: FromWorker) -> tuple[bool, bool]:
        """Take a worker's message; returns whether this agent has started it, and whether it has made progress."""
        with self._lock:
            record = self._records.get(name)
            return record is not None, record is not None and record.note_from_worker(message)

    def note_from_manager(self, name: str, message: ToWorker) -> None:
        """Take a message of the manager to a worker."""
        with self._lock:
            if name in self._records:
                self._records[name].note_from_manager(message)

    def broke_off(self, name: str) -> bool:
        """Return whether a worker was in a generation and has not left it, so that it is lost if its process ends."""
        with self._lock:
            record = self._records.get(name)
            return record is not None and record.generation >= 0 and record.leaving is None

    def ended(self, name: str, exited: Exited) -> bool:
        """Note that a process ended; False if this agent does not know it, as after ``clear``."""
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
