"""Gives the state machine its events, and does what it says, on one thread."""

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from varuna.core.messages import ToWorker
from varuna.fleet.events import Event, Tick, WorkerSpawned
from varuna.fleet.instructions import Collect, EndRun, Instruction, Kill, Publish, Send, Spawn
from varuna.fleet.journal import Journal
from varuna.fleet.keeper import CheckpointKeeper
from varuna.fleet.machine import advance
from varuna.fleet.state import Advice, Ended, Fleet, FleetConfig
from varuna.fleet.story import GenerationStarted, Notice, RunEvent

_TICK_S = 0.2

Observer = Callable[[RunEvent], None]


class Hands(Protocol):
    """What the manager needs of the world of processes and connections."""

    def spawn(self) -> str:
        """Start a worker; returns its name."""
        ...

    def kill(self, name: str) -> None:
        """End a worker for certain."""
        ...

    def set_main(self, name: str) -> None:
        """Show the output of this worker."""
        ...

    def send(self, name: str, message: ToWorker) -> None:
        """Tell a worker."""
        ...


class Manager:
    """Owns the fleet. ``post`` may be called by any thread and by signal handlers; the rest runs in ``run``."""

    def __init__(
        self,
        config: FleetConfig,
        advice: Advice,
        *,
        hands: Hands,
        journal: Journal,
        keeper: CheckpointKeeper,
        observer: Observer,
    ) -> None:
        self._advice, self._hands, self._journal, self._keeper = advice, hands, journal, keeper
        self._observer = observer
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()  # its put is safe in signal handlers
        self.fleet = Fleet.empty(config, time.monotonic())
        """Replaced as a whole, so any thread may read it."""

    def post(self, event: Event) -> None:
        """Something happened."""
        self._queue.put(event)

    def warn(self, text: str) -> None:
        """Log and show a warning; for use on the manager's own thread."""
        self._publish(Notice(text=text, warning=True))

    def run(self) -> Ended:
        """Manage until the run ends; workers are told, but may still live."""
        next_tick_s = time.monotonic()
        while not isinstance(self.fleet.phase, Ended):
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._handle(Tick())
                continue
            try:
                self._handle(self._queue.get(timeout=next_tick_s - now_s))
            except queue.Empty:
                continue
        return self.fleet.phase

    def _handle(self, event: Event) -> None:
        """One event, and those that follow from it at once: a worker must be known before it can speak."""
        events: deque[Event] = deque([event])
        while events:
            self.fleet, instructions = advance(self.fleet, events.popleft(), time.monotonic(), self._advice)
            for instruction in instructions:
                events.extend(self._execute(instruction))

    def _execute(self, instruction: Instruction) -> list[Event]:
        match instruction:
            case Send(worker=name, message=message):
                self._hands.send(name, message)
            case Kill(worker=name):
                self._hands.kill(name)
            case Spawn(count=count):
                return [WorkerSpawned(self._hands.spawn()) for _ in range(count)]
            case Collect(shard=shard):
                self._keeper.collect(shard)
            case Publish(event=event):
                self._publish(event)
            case EndRun():
                pass  # the fleet's phase says it
        return []

    def _publish(self, event: RunEvent) -> None:
        """Disk first: nobody hears of a verdict or a generation that a crash could forget."""
        self._journal.append(event)
        if isinstance(event, GenerationStarted):
            assert self.fleet.job is not None
            self._keeper.begin(self.fleet.job, event.record.plan.micro_batch)
            self._hands.set_main(event.record.members[0])
        self._observer(event)
