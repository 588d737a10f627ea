"""One event's passage through the state machine."""

from dataclasses import replace
from typing import Any

from varuna.core.messages import Finish, ToWorker
from varuna.fleet.instructions import EndRun, Instruction, Kill, Publish, Send
from varuna.fleet.state import Advice, Ended, Fleet, Idle, Running, Stopping
from varuna.fleet.story import Notice, RunEnded, RunEvent, WorkerLost
from varuna.fleet.worker import Standing, Worker

_MAX_BACKOFF_S = 30.0


class Turn:
    """The fleet as it is so far, and what the shell must do; lives for one call of ``machine.advance``."""

    def __init__(self, fleet: Fleet, now_s: float, advice: Advice) -> None:
        self.fleet = fleet
        self.now_s = now_s
        self.advice = advice
        self.instructions: list[Instruction] = []

    def update(self, **changes: Any) -> None:
        """Replace fields of the fleet."""
        self.fleet = replace(self.fleet, **changes)

    def update_worker(self, name: str, **changes: Any) -> None:
        """Replace fields of one worker."""
        workers = self.fleet.workers
        self.update(workers={**workers, name: replace(workers[name], **changes)})

    def forget(self, name: str) -> Worker:
        """Remove a worker: whatever it says from now on is ignored."""
        workers = dict(self.fleet.workers)
        worker = workers.pop(name)
        self.update(workers=workers)
        return worker

    def send(self, worker: str, message: ToWorker) -> None:
        """Tell a worker."""
        self.instructions.append(Send(worker, message))

    def publish(self, event: RunEvent) -> None:
        """Log and show."""
        self.instructions.append(Publish(event))

    def notice(self, text: str, *, warning: bool = False) -> None:
        """Log and show a sentence."""
        self.publish(Notice(text=text, warning=warning))

    def kill(self, worker: str, why: str) -> None:
        """Fence a worker off for certain."""
        self.instructions.append(Kill(worker, why))

    def lose(self, name: str, what: str, *, kill: bool = False) -> None:
        """A worker is gone, or is made to go; ``what`` continues the sentence "worker w3 ..."."""
        cause = f"worker {name} {what}"
        if kill:
            self.kill(name, cause)
        matters = self._matters(name)
        was_in = self.fleet.workers[name].standing in (Standing.JOINED, Standing.ASIDE)
        worker = self.forget(name)
        fleet = self.fleet
        self.publish(WorkerLost(worker=name, rank=fleet.rank_of(name), cause=cause))
        if matters:
            self.update(causes=(*fleet.causes, cause), futile=0, futile_since_s=None)
        if fleet.history and was_in:
            self.note_change()
        if not fleet.config.replace:
            self.update(wanted=max(0, fleet.wanted - 1))
        elif worker.replacement:
            failures = fleet.start_failures + 1
            backoff_s = min(2.0 ** (failures - 1), _MAX_BACKOFF_S) if worker.standing is Standing.STARTING else 0.0
            self.update(start_failures=failures, respawn_at_s=self.now_s + backoff_s)
            if failures >= fleet.config.max_start_failures:
                self.end(
                    1,
                    f"{failures} replacements in a row died before a step was committed. The last one: {cause}. "
                    "Look at its log; if it ran out of memory, use fewer workers per machine.",
                )

    def note_change(self) -> None:
        """Workers came or went: what the run learns its expectations from."""
        experience = self.fleet.experience.changed(self.now_s, self.fleet.config.join_grace_s)
        self.update(experience=experience)

    def _matters(self, name: str) -> bool:
        """Whether the loss of a worker ends (or ended) a generation."""
        fleet = self.fleet
        match fleet.phase:
            case Running():
                # Until the first step a spare may still be the source of somebody's state.
                return name in (fleet.record.grid if fleet.formed else fleet.members)
            case Idle() | Stopping():
                return name in fleet.members
            case _:
                return False

    def end(self, exit_code: int, text: str) -> None:
        """The run is over; everybody who still listens is told."""
        if isinstance(self.fleet.phase, Ended):
            return
        reason = text.splitlines()[0] if exit_code else ""
        for name in self.fleet.joined:
            self.send(name, Finish(reason=reason))
        self.publish(RunEnded(exit_code=exit_code, text=text))
        self.instructions.append(EndRun(exit_code, text))
        self.update(phase=Ended(exit_code, text))
