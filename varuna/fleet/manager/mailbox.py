"""The manager's mailbox, in the order of arrival: the one thing that the parts around the manager share with it."""

import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from varuna.core.messages import Beat
from varuna.fleet.manager.reconcile import Reconciliation
from varuna.fleet.state.inputs import Event
from varuna.fleet.state.run_events import (
    Audited,
    Budgeted,
    CheckpointCommitted,
    GenerationTimed,
    Notice,
    Priced,
    WaitsSplit,
)

_ASK_S = 8.0  # less than the patience of who asks


class Request(NamedTuple):
    """Somebody waits until ``event`` is written down."""

    event: Event
    done: threading.Event


class Broken(NamedTuple):
    """The manager cannot go on."""

    error: BaseException


@dataclass(frozen=True)
class Leave:
    """This manager manages no more, while the run goes on."""


class Pulses(NamedTuple):
    """Agents said that they live, one after the other: by machine, the newest beats of its workers, if any."""

    beats: tuple[tuple[str, Mapping[str, Beat]], ...]


Posted = (
    Event
    | Pulses
    | Request
    | Reconciliation
    | Audited
    | Notice
    | GenerationTimed
    | WaitsSplit
    | Priced
    | Budgeted
    | CheckpointCommitted
    | Broken
    | Leave
)
"""Posts: events for the state machine, an agent's return, and lines for the journal."""


class Mailbox:
    """Any thread may post, signal handlers too; the manager alone takes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Posted] = queue.SimpleQueue()  # its put is safe in signal handlers

    def post(self, event: Posted) -> None:
        """Queue something; returns at once."""
        self._queue.put(event)

    def post_all(self, events: Iterable[Posted]) -> None:
        """Queue several things, in order."""
        for event in events:
            self._queue.put(event)

    def post_request(self, event: Event, bound_s: float = _ASK_S) -> bool:
        """Post a request of a person or a cloud; return whether this manager or the next certainly carries it out.

        False if it was not taken down in time: it may be, later. Waits; not for the manager's own thread.
        """
        request = Request(event, threading.Event())
        self._queue.put(request)
        return request.done.wait(bound_s)

    def warn(self, text: str) -> None:
        """Log and show a warning soon."""
        self._queue.put(Notice(text=text, warning=True))

    def fail(self, error: BaseException) -> None:
        """Something that nobody foresaw ends the manager, as it would have on its own thread."""
        self._queue.put(Broken(error))

    def take_oldest(self, timeout_s: float) -> Posted | None:
        """Take the oldest thing; None if nothing comes in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def take_all(self) -> list[Posted]:
        """Take everything that is there now."""
        found = []
        while not self._queue.empty():
            found.append(self._queue.get())
        return found
