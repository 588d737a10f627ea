"""A worker's side of its connection to the manager."""

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from pydantic import ValidationError
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import connect

from varuna.core.devices import DeviceFacts, DeviceFault
from varuna.core.errors import FleetError
from varuna.core.membership import Directive
from varuna.core.messages import (
    MAX_FRAME_BYTES,
    MAX_KEYS,
    MAX_WORK_BYTES,
    Apply,
    Assign,
    Beat,
    Failed,
    Finish,
    Flag,
    Found,
    FromWorker,
    Hello,
    Hold,
    Leaving,
    Offered,
    ProfileSteps,
    RaiseFlag,
    Recorded,
    Saved,
    Shown,
    ShowRequest,
    ShowStep,
    Sought,
    StopReport,
    Suspect,
    ToWorker,
    TrainingOver,
    Unsaved,
    Vote,
    Voted,
    WorkFound,
    WorkOffered,
    WorkSought,
    to_worker,
)
from varuna.core.model import JobFacts
from varuna.core.saved import SavedShard
from varuna.core.version import __version__
from varuna.process.console import say, warn
from varuna.process.threads import start

_AGAIN_S = 3.0
"""Interval at which offers and questions are repeated: a restarted manager knows none of them."""
_FRESH_S = 5.0
"""Age after which a value is asked for again: some values change, such as what a member is doing."""
_AWAY_S = 20.0
"""Time without any answer after which known values are not trusted any more."""


class Rendezvous:
    """The store of one generation. ``take_values`` runs on the connection's thread, the rest on any.

    Args:
        generation: its number.
        post: sends to the manager.
        clock: seconds.
    """

    def __init__(
        self, generation: int, post: Callable[[FromWorker], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.generation = generation
        self._post, self._clock = post, clock
        self._lock = threading.Lock()
        self._own: dict[str, bytes] = {}
        self._values: dict[str, tuple[bytes, float]] = {}  # of others, and when they came
        self._sought_s: dict[str, float] = {}  # when a key that was not answered was sought first, and last
        self._asked_s: dict[str, float] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Offer a value to all members, the first one or a newer one."""
        with self._lock:
            self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._offer([key])

    def get(self, key: str) -> bytes:
        """A value that ``check`` has found, a few seconds old at most while members call ``check``.

        Raises:
            KeyError: it has not come.
        """
        with self._lock:
            return self._own[key] if key in self._own else self._values[key][0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all values are here; what is missing, or old, is sought.

        Raises:
            RuntimeError: the manager has not answered for long about a value that was here.
        """
        now_s = self._clock()
        with self._lock:
            missing = [key for key in keys if key not in self._own and key not in self._values]
            old = [key for key in keys if key in self._values and now_s - self._values[key][1] > _FRESH_S]
            if old:  # one question for all old values: a caller that reads one reads the others
                old = [key for key, (_, came_s) in self._values.items() if now_s - came_s > _FRESH_S]
            wanted = [key for key in (*missing, *old) if now_s - self._asked_s.get(key, -_AGAIN_S) >= _AGAIN_S]
            again = [key for key in wanted if key in self._sought_s]
            for key in wanted:
                self._asked_s[key] = now_s
                self._sought_s.setdefault(key, now_s)
            away = [key for key in old if now_s - self._sought_s.get(key, now_s) > _AWAY_S]
        if again:
            self._offer(list(self._own))
        for first in range(0, len(wanted), MAX_KEYS):
            self._post(Sought(generation=self.generation, keys=tuple(wanted[first : first + MAX_KEYS])))
        if away:
            raise RuntimeError(f"the manager has not answered for {_AWAY_S:.0f} s")
        return not missing

    def take_values(self, found: Found) -> None:
        """Take values that have arrived."""
        if found.generation != self.generation:
            return
        now_s = self._clock()
        with self._lock:
            for key, value in found.values.items():
                self._values[key] = value, now_s
                self._sought_s.pop(key, None)
                self._asked_s.pop(key, None)

    def _offer(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._post(Offered(generation=self.generation, key=key, value=self._own[key]))


_BEAT_S = 0.5
_FLUSH_S = 5.0
_ASK_AGAIN_S, _UNHEARD_S, _LONG_S, _WORK_S = 2.0, 6.0, 10.0, 300.0
"""Until others' work is sought again; how long it is waited for without an answer; when that is said; and the most."""


class Connection(Protocol):
    """Frames to and from the manager; iterating over it yields what comes in, until it is closed."""

    @property
    def close_reason(self) -> str | None:
        """Reason for which the other side closed it."""
        ...

    def send(self, message: str, /) -> None:
        """Send a frame."""
        ...

    def __iter__(self) -> Iterator[str | bytes]: ...


Dial = Callable[[], AbstractContextManager[Connection]]


class ManagedMembership:
    """The manager's client, a ``core.membership.Membership``.

    Three daemon threads: one reads, and runs the callbacks of ``join``; one writes what the others queue; one
    beats. So neither a slow manager nor a busy training thread delays a heartbeat.

    Losing the launcher ends a worker (see ``process.tethering``): nobody could give it work any more.
    """

    survives = True

    def __init__(self, url: str, token: str, worker: str, *, dial: Dial | None = None, measures: bool = True) -> None:
        """Prepare; nothing is sent before ``join``.

        Args:
            url: of the manager.
            token: what it knows its workers by.
            worker: this worker's name.
            dial: opens the connection. Default: a WebSocket to ``url``.
            measures: whether the manager plans from what its workers measure.
        """
        self.measures, self._calibrations = measures, ""
        self._dial = dial or self._web_socket
        self._url, self._token, self._worker = url, token, worker
        self._outbox: queue.SimpleQueue[tuple[FromWorker, threading.Event] | None] = queue.SimpleQueue()
        self._directives: queue.SimpleQueue[Directive | FleetError] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closing = ExitStack()
        self._closed = threading.Event()
        self._training = -1
        self._is_training = False
        self._beat_now: Callable[[], Beat] | None = None
        self._work: queue.SimpleQueue[WorkFound | None] = queue.SimpleQueue()
        self._recorded_step = -1
        self._rendezvous: Rendezvous | None = None
        self._on_hold: Callable[[int], None] = lambda generation: None
        self._on_flag: Callable[[int, Flag], None] = lambda generation, flag: None
        self._on_show: Callable[[ShowRequest], None] = lambda request: None

    @property
    def worker(self) -> str:
        """This worker's name."""
        return self._worker

    @property
    def recorded_step(self) -> int:
        """Newest step whose vote the manager has."""
        return self._recorded_step

    @property
    def trainings(self) -> int:
        """Number of trainings that this process has begun: the number of the next one."""
        return self._training + 1

    def offer_calibrations(self, calibrations: str) -> None:
        """Keep it for the Hello."""
        self._calibrations = calibrations

    def join(
        self,
        job: JobFacts,
        *,
        device: DeviceFacts | None = None,
        device_class: str = "",
        beat: Callable[[], Beat],
        on_hold: Callable[[int], None],
        on_flag: Callable[[int, Flag], None],
        on_show: Callable[[ShowRequest], None] = lambda request: None,
    ) -> None:
        """Connect and say Hello, for the next of the script's trainings.

        A refusal comes later, as an error or as ``Finish`` with a failure.

        Raises:
            FleetError: the manager does not answer, or the training before this one is not over.
        """
        if self._is_training:
            raise FleetError(
                f"worker {self._worker} begins training {self._training + 2} of the script, and training "
                f"{self._training + 1} is not over. Under a manager trainings follow one another: let the loop over "
                "trainer.steps(n) end before the next one begins."
            )
        if self._connection is None:
            self._connect()
        self._on_hold, self._on_flag, self._on_show = on_hold, on_flag, on_show
        self._training, self._is_training, self._recorded_step = self._training + 1, True, -1
        is_first, self._beat_now = self._beat_now is None, beat
        self._post(
            Hello(
                worker=self._worker,
                pid=os.getpid(),
                version=__version__,
                job=job,
                device=device,
                device_class=device_class,
                measured=self._calibrations,
                training=self._training,
            )
        )
        self._calibrations = ""
        if is_first:
            start("beat", self._beat)

    def seek_work(self, key: str, what: str, bound_s: float = _WORK_S) -> bytes:
        """Return what another worker of the run has done, or does now; empty: this worker is to do it, and to offer it.

        Args:
            key: names the work, with all that it depends on.
            what: the work, for people.
            bound_s: most seconds to wait for the other worker; for a manager that does not answer, a few seconds.
        """
        try:
            if self._connection is None:
                self._connect()
        except FleetError:
            return b""  # joining says more
        now_s = time.monotonic()
        until_s, heard_s, again_s, told_s = now_s + bound_s, now_s, now_s, now_s + _LONG_S
        while now_s < min(until_s, heard_s + _UNHEARD_S):
            if now_s >= again_s:
                self._post(WorkSought(key=key))
                again_s = now_s + _ASK_AGAIN_S
            found = self._work_found(again_s - now_s)
            now_s = time.monotonic()
            if found is None:  # the connection has ended
                return b""
            if found.key == key and not found.doer:
                return found.data
            heard_s = now_s if found.key == key else heard_s
            if found.doer and now_s >= told_s:
                say(f"worker {self._worker} waits for {what}, at which worker {found.doer} is")
                told_s = math.inf
        return b""

    def _work_found(self, timeout_s: float) -> WorkFound | None:
        """Wait for the next answer; of no key if none comes in time, None if none will."""
        try:
            found = self._work.get(timeout=timeout_s)
        except queue.Empty:
            return WorkFound(key="")
        if found is None:
            self._work.put(None)
        return found

    def offer_work(self, key: str, data: bytes) -> None:
        """Offer others what this worker has done; empty, or too long: each of them has to do it."""
        self._post(WorkOffered(key=key, data=data if len(data) <= MAX_WORK_BYTES else b""))

    def _connect(self) -> None:
        try:
            self._connection = self._closing.enter_context(self._dial())
        except InvalidStatus as error:
            said = bytes(error.response.body or b"").decode(errors="replace")
            raise FleetError(
                f"worker {self._worker} was refused by the manager at {self._url}: {said or error.response.status_code}"
            ) from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise FleetError(f"worker {self._worker} cannot reach the manager at {self._url}: {error}") from error
        if self._closed.is_set():  # meanwhile, or before: nobody would tell it anything any more
            self._closing.close()
            raise FleetError(f"worker {self._worker} was ended before it had joined the manager at {self._url}")
        for name, target in (("reader", self._read), ("writer", self._write)):
            start(name, target)

    def _web_socket(self) -> AbstractContextManager[Connection]:
        return connect(
            f"{self._url}?worker={self._worker}",
            additional_headers={"Authorization": f"Bearer {self._token}"},
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ping_interval=None,  # our own beats say more
            proxy=None,
        )

    def next_directive(self) -> Directive:
        """Block until there is something to do.

        Raises:
            FleetError: the manager is gone, or closed the connection.
        """
        directive = self._directives.get()
        while not isinstance(directive, FleetError) and self._is_late(directive):
            directive = self._directives.get()
        if isinstance(directive, FleetError):
            self._directives.put(directive)  # whoever asks again gets the same answer
            raise directive
        if isinstance(directive, Finish | TrainingOver):
            self._is_training = False
        return directive

    def _is_late(self, directive: Directive) -> bool:
        """Whether it was on its way when this worker had left the training that it is about."""
        match directive:
            case TrainingOver(training=training) | Finish(training=training, failure=None):
                return training < self._training
            case _:
                return False

    def store(self, generation: int) -> Rendezvous:
        """Return the store in which the members of a generation find each other."""
        self._rendezvous = Rendezvous(generation, self._post)
        return self._rendezvous

    def held(self, held: StopReport) -> None:
        """Answer a hold of the manager with what this worker holds."""
        self._post(held)

    def voted(self, vote: Vote) -> None:
        """Report a committed step."""
        self._post(Voted(vote=vote))

    def suspect(self, generation: int, reason: str, fault: DeviceFault | None = None, peer: int | None = None) -> None:
        """Report a broken link, a rank that cannot be reached, or a fault of this worker's device that it survives."""
        self._post(Suspect(generation=generation, reason=reason, fault=fault, peer=peer))

    def saved(self, shard: SavedShard) -> None:
        """Report a durable shard."""
        self._post(Saved(shard=shard))

    def unsaved(self, reason: str) -> None:
        """Report, and print into this worker's log, that a checkpoint lacks a shard."""
        warn(reason)
        self._post(Unsaved(reason=reason))

    def shown(self, answer: Shown) -> None:
        """Answer what somebody wants to see."""
        self._post(answer)

    def failed(
        self,
        summary: str,
        traceback: str,
        exit_code: int,
        fault: DeviceFault | None = None,
        accused: int | None = None,
    ) -> None:
        """Report an exception, also one from before ``join``; waits at most 5 s for it to go out."""
        if self._connection is None:
            try:
                self._connect()
            except FleetError:
                return  # nobody to tell; Python prints it, and the launcher reads that
        said = Failed(summary=summary, traceback=traceback, exit_code=exit_code, fault=fault, accused=accused)
        self._post(said).wait(_FLUSH_S)

    def leaving(self, step: int) -> None:
        """Report the end of the loop; waits at most 5 s for it to go out."""
        self._is_training = False
        self._post(Leaving(step=step, training=max(0, self._training))).wait(_FLUSH_S)

    def close(self) -> None:
        """Drop the connection to the manager."""
        self._closed.set()
        self._outbox.put(None)
        self._closing.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _post(self, message: FromWorker) -> threading.Event:
        """Queue a message; the event is set once it is out, or can no longer be sent."""
        sent = threading.Event()
        if self._closed.is_set():
            sent.set()
        else:
            self._outbox.put((message, sent))
        return sent

    def _write(self) -> None:
        assert self._connection is not None
        while (item := self._outbox.get()) is not None:
            message, sent = item
            try:
                self._connection.send(message.model_dump_json())
            except ConnectionClosed:
                self._closed.set()  # the reader says why
            finally:
                sent.set()

    def _read(self) -> None:
        assert self._connection is not None
        reason = "the connection was closed here"
        try:
            for frame in self._connection:
                self._take(to_worker.validate_json(frame))
            reason = self._connection.close_reason or "the manager closed the connection"
        except ConnectionClosed as closed:
            reason = closed.rcvd.reason if closed.rcvd is not None and closed.rcvd.reason else "the connection broke"
        except ValidationError as error:
            reason = f"the manager sent a message that this version does not understand: {error}"
        finally:
            self._closed.set()
            self._outbox.put(None)
            self._work.put(None)
            self._directives.put(FleetError(f"worker {self._worker} lost the manager at {self._url}: {reason}"))

    def _take(self, message: ToWorker) -> None:
        """Deliver a message; Hold, RaiseFlag and wishes to see at once, the rest to who asks for directives."""
        match message:
            case Hold(generation=generation):
                self._on_hold(generation)
            case RaiseFlag(generation=generation, flag=flag):
                self._on_flag(generation, flag)
            case ShowStep() | ProfileSteps():
                self._on_show(message)
            case Found():
                if self._rendezvous is not None:
                    self._rendezvous.take_values(message)
            case WorkFound():
                self._work.put(message)
            case Recorded(step=step):
                self._recorded_step = step
            case Assign(assignment=assignment):
                # A rollback takes recorded steps back; in all other cases this changes nothing.
                self._recorded_step = assignment.next_step - 1
                self._directives.put(message)
            case Apply() | Finish() | TrainingOver():
                self._directives.put(message)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            if self._beat_now is not None:
                self._post(self._beat_now())


def from_environment() -> ManagedMembership | None:
    """The member of a process that a launcher started; None in any other process."""
    url = os.environ.get("VARUNA_MANAGER")
    if not url:
        return None
    return ManagedMembership(url, os.environ.get("VARUNA_TOKEN", ""), os.environ.get("VARUNA_WORKER", ""))
