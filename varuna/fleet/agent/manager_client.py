"""The agent's connection to its manager: one event loop, one TLS connection at a time, made again when it breaks."""

import asyncio
import contextlib
import random
import secrets
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from varuna.core.errors import FleetError
from varuna.core.messages import MAX_FRAME_BYTES, Beat, Relay
from varuna.fleet.agent.moved_manager import MovedManager
from varuna.fleet.net.agent_session import AgentSession, ChannelFullError, Outgoing
from varuna.fleet.net.beats import BeatMemory
from varuna.fleet.net.ca import SERVER_NAME, client_context, fingerprint
from varuna.fleet.net.client import explain, reason
from varuna.fleet.net.host_facts import HostFacts
from varuna.fleet.net.protocol import (
    BAD_JOB,
    BAD_MESSAGE,
    DownBody,
    DownItem,
    Greet,
    Identity,
    JobIdentity,
    Output,
    Printed,
    Pulse,
    UpBody,
    UpItem,
    Welcome,
    WorkerSnapshot,
    down_frame,
)
from varuna.fleet.net.source import SOURCE_HEADER, check_same, source
from varuna.process.console import warn

_SILENCE_S = 8.0
_ASK_S = 4.0  # of silence: an answer to each pulse would be half of what a manager of thousands does
_FIRST_DELAY_S = 0.05
_MOST_FAULTS = 5  # connections in a row that end with an error that nobody foresaw
_MOST_REJECTIONS = 20  # the same with words that the manager does not take
_ITEMS_WAITING = 8192
_PRINTED_WAITING = 1000


@dataclass(frozen=True)
class ManagerAddress:
    """A manager's address, and the authority that vouches for it."""

    host: str
    port: int
    certificate_pem: str
    join_file: Path | None = None
    """Says where it is, if it has moved."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class ClientBounds:
    """Bounds on a client's waits, in seconds."""

    pulse_s: float = 1.0
    """between two pulses"""
    open_s: float = 10.0
    """for a connection, its greeting, and its end"""
    start_s: float = 10.0
    """for its own event loop"""
    longest_delay_s: float = 2.0
    """between two tries"""
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class Welcomed:
    """The manager answered: both sides go on, or it has to be told everything anew."""

    welcome: Welcome
    epoch: int
    """Grows whenever the manager has to be told everything anew."""
    interface: str
    """Own address on the way to the manager."""


@dataclass(frozen=True)
class Refused:
    """The manager refuses this agent, or this side cannot go on: there is no further try."""

    reason: str
    is_void: bool = False
    """Its secret: another token may help."""


@dataclass(frozen=True)
class Trouble:
    """The connection broke, or could not be made; it is tried again."""

    reason: str
    was_welcome: bool


FromUplink = Welcomed | Refused | Trouble
"""News of the agent's connection, besides what the manager says."""


class ManagerClient:
    """Owns a thread with an event loop; ``send``, ``start`` and ``stop`` may be called by any thread.

    Args:
        place: where the manager is.
        identity: this agent's.
        job: what we run.
        relay: this machine's port, if others reach it.
        snapshots: gives the snapshots of all workers; called on the loop.
        beats: new beats; called on the loop.
        host: what is known of this machine; called on the loop.
        on_event: hears of the connection, on the loop.
        on_body: hears what the manager says, on the loop.
        on_confirmed: hears of output that the manager has, on the loop.
        bounds: of its waits.
    """

    def __init__(
        self,
        place: ManagerAddress,
        identity: Identity,
        job: JobIdentity,
        relay: Relay | None = None,
        *,
        snapshots: Callable[[], tuple[WorkerSnapshot, ...]],
        beats: Callable[[], dict[str, Beat]],
        host: Callable[[], HostFacts | None] = lambda: None,
        on_event: Callable[[FromUplink], None],
        on_body: Callable[[DownBody], None],
        on_confirmed: Callable[[list[Output]], None],
        bounds: ClientBounds | None = None,
    ) -> None:
        self._bounds = bounds or ClientBounds()
        self.place, self._identity, self._job, self._relay = place, identity, job, relay
        self._snapshots, self._beats, self._host = snapshots, beats, host
        self._on_event, self._on_body, self._on_confirmed = on_event, on_body, on_confirmed
        self._moved = MovedManager(place.join_file, fingerprint(place.certificate_pem))
        self._tls = client_context(place.certificate_pem)
        self._session = _new_session()
        self._manager = self._run = ""
        self._connections = self._epoch = self._rejections = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="varuna-uplink", daemon=True)

    def start(self) -> None:
        """Connect, and stay connected.

        Raises:
            FleetError: the thread's event loop did not start within 10 s.
        """
        self._thread.start()
        if not self._ready.wait(self._bounds.start_s):
            raise FleetError(
                f"the event loop of the connection to {self.place} did not start within {self._bounds.start_s:.0f} s. "
                "Is this machine short of memory, processes or open files? Look at `ulimit -a`."
            )

    def stop(self, flush_s: float) -> None:
        """Wait at most ``flush_s`` until the manager has everything, then close."""
        self._call(self._finish, flush_s)
        self._thread.join(flush_s + self._bounds.open_s)

    def send(self, body: UpBody, *, epoch: int | None = None) -> None:
        """Queue a message; with ``epoch``, only if that is still the one that counts."""
        self._call(self._enqueue, body, epoch)

    def _call(self, work: Callable[..., object], *args: object) -> None:
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended just now
                self._loop.call_soon_threadsafe(work, *args)

    def _stay(self) -> None:
        """The thread's work; whatever ends it is reported to the agent, which is cut off without it."""
        try:
            asyncio.run(self._main())
        except Exception as error:  # noqa: BLE001
            self._on_event(
                Refused(f"the connection to {self.place} failed with an internal error (please report it): {error!r}")
            )

    # -- on the loop ---------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._ready.set()
        delay_s, faults = _FIRST_DELAY_S, 0
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                before, fault = self._connections, None
                try:
                    trouble = await self._one_connection()
                except InvalidStatus as error:
                    if error.response.status_code == 403:
                        said = reason(bytes(error.response.body or b""))
                        self._on_event(Refused(f"the manager at {self.place} refused this agent: {said}", is_void=True))
                        return
                    trouble = str(explain(error, str(self.place)))
                except (OSError, TimeoutError, InvalidHandshake) as error:  # ssl.SSLError is an OSError
                    trouble = str(explain(error, str(self.place)))
                except FleetError as error:
                    self._on_event(Refused(str(error)))
                    return
                except Exception as error:  # noqa: BLE001 - a few are told, then one is raised
                    fault, trouble = error, f"internal error (please report it): {error!r}"
                    warn(f"the connection to {self.place} ended with an unexpected error:\n{traceback.format_exc()}")
                    self._begin_anew()  # whatever was said halfway is said again
                faults = 0 if fault is None else faults + 1
                if fault is not None and faults == _MOST_FAULTS:
                    raise fault
                if self._rejections == _MOST_REJECTIONS:
                    text = (
                        f"the manager at {self.place} rejected this agent's messages {_MOST_REJECTIONS} times: "
                        f"{trouble}"
                    )
                    self._on_event(Refused(text))
                    return
                was_welcome = self._connections > before
                is_well = was_welcome and not faults and not self._rejections
                delay_s = _FIRST_DELAY_S if is_well else min(self._bounds.longest_delay_s, delay_s * 1.7)
                self._on_event(Trouble(trouble, was_welcome))
                if (moved := self._moved.newest()) is not None:
                    self.place = replace(self.place, host=moved.host, port=moved.port)
                await self._bounds.pause(random.uniform(0.5, 1.0) * delay_s)

    async def _one_connection(self) -> str:
        """Connect, greet, talk until it breaks; returns why it did.

        Raises:
            FleetError: the manager refuses this agent for good.
            OSError: it cannot be reached; also TimeoutError and InvalidHandshake.
        """
        async with connect(
            f"wss://{_bracketed(self.place.host)}:{self.place.port}/agent?node={self._identity.node}",
            ssl=self._tls,
            server_hostname=SERVER_NAME,
            additional_headers={"Authorization": f"Bearer {self._identity.secret}", SOURCE_HEADER: source()},
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=self._bounds.open_s,
            close_timeout=1.0,
            ping_interval=None,  # pulses say more
            proxy=None,
        ) as websocket:
            try:
                return await self._talk(websocket)
            except ConnectionClosed as closed:
                code = closed.rcvd.code if closed.rcvd is not None else None
                why = closed.rcvd.reason if closed.rcvd is not None else "the connection broke"
                self._rejections = self._rejections + 1 if code == BAD_MESSAGE else 0
                if code == BAD_MESSAGE and not self._connections:  # who has work may yet find its manager again
                    check_same(websocket.response, str(self.place))
                if code == BAD_JOB:
                    raise FleetError(f"the manager at {self.place} refused this agent: {why}") from closed
                return why or "the manager closed the connection"
            except (ValidationError, ValueError) as error:
                self._begin_anew()
                if not self._connections:
                    check_same(websocket.response, str(self.place))
                return f"the manager sent a message that this version does not understand: {error}"
            finally:
                self._session.connection = None

    async def _talk(self, websocket: ClientConnection) -> str:
        session, mark = self._session, self._session.sent  # what is queued from here on is not in the snapshots
        greet = Greet(
            session=session.name,
            manager=self._manager,
            run=self._run,
            job=self._job,
            received=self._session.received,
            snapshots=self._snapshots(),
            relay=self._relay,
        )
        async with asyncio.timeout(
            self._bounds.open_s
        ):  # a frozen manager does not read what exceeds the sockets' buffers
            await websocket.send(greet.model_dump_json())
            welcome = down_frame.validate_json(await websocket.recv())
        if not isinstance(welcome, Welcome):
            raise ValueError("no welcome")
        if self._session is not session:
            return "too many messages came before the manager's answer"
        outgoing = self._meet(websocket, welcome, mark)
        heard = [asyncio.get_running_loop().time()]
        tasks = [
            asyncio.create_task(outgoing.send_all(websocket.send)),
            asyncio.create_task(self._receive_all(websocket, heard)),
            asyncio.create_task(self._beat(outgoing, heard)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _meet(self, websocket: ClientConnection, welcome: Welcome, mark: int) -> Outgoing[UpBody]:
        """Go on where the last connection ended, or begin to count anew with what the greeting did not say."""
        if welcome.resumed:
            self._confirm(welcome.received)
        else:
            later = [body for number, body in self._session.waiting if number > mark and not isinstance(body, Output)]
            self._session = _new_session(self._session.name)
            self._epoch += 1
            for body in later:
                self._session.send(body)
        self._manager, self._run = welcome.manager, welcome.run
        outgoing = self._session.connect(welcome.received if welcome.resumed else 0)
        self._connections += 1
        local = websocket.transport.get_extra_info("sockname")
        self._on_event(Welcomed(welcome, self._epoch, local[0]))
        return outgoing

    async def _receive_all(self, websocket: ClientConnection, heard: list[float]) -> str:
        async for text in websocket:
            heard[0] = asyncio.get_running_loop().time()
            frame = down_frame.validate_json(text)
            self._confirm(frame.received)
            if isinstance(frame, DownItem) and self._session.accept(frame.number):
                self._on_body(frame.body)
        return "the manager closed the connection"

    async def _beat(self, outgoing: Outgoing[UpBody], heard: list[float]) -> str:
        """A pulse a second, at a phase of its own; a manager that answers none is out of reach."""
        await asyncio.sleep(random.uniform(0.0, self._bounds.pulse_s))
        told: HostFacts | None = None  # on this connection
        memory = BeatMemory()
        while (silent_s := asyncio.get_running_loop().time() - heard[0]) < _SILENCE_S:
            host = self._host()
            news, told = host if host is not told else None, host
            asks = bool(self._session.waiting) or silent_s >= _ASK_S
            beats, received = memory.shorten(self._beats()), self._session.received
            outgoing.say(Pulse(received=received, asks=asks, beats=beats, clock_s=time.time(), host=news))
            await asyncio.sleep(self._bounds.pulse_s)
        return f"the manager was silent for {_SILENCE_S:.0f} s"

    def _confirm(self, number: int) -> None:
        done = [body for body in self._session.confirm(number) if isinstance(body, Output)]
        if done:
            self._on_confirmed(done)

    def _enqueue(self, body: UpBody, epoch: int | None) -> None:
        if epoch is not None and epoch != self._epoch:
            return
        if isinstance(body, Printed) and len(self._session.waiting) > _PRINTED_WAITING:
            return  # nobody listens; the log has it
        try:
            self._session.send(body)
        except ChannelFullError:
            self._begin_anew()  # the next greeting says everything that counts

    def _begin_anew(self) -> None:
        """Forget what was said; the manager will be told everything."""
        before, self._session = self._session, _new_session()
        if before.connection is not None:
            before.connection.end("too many messages were not acknowledged")

    def _finish(self, flush_s: float) -> None:
        task = self._task
        if task is None or task.done():
            return  # the loop is about to close: what is begun now would never run

        async def finish() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(flush_s):
                    while self._session.waiting:
                        await asyncio.sleep(0.02)
            task.cancel()

        self._finishing = asyncio.create_task(finish())


def _new_session(name: str = "") -> AgentSession[UpBody]:
    return AgentSession(name or secrets.token_hex(8), UpItem, _ITEMS_WAITING)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
