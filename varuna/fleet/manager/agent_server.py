"""The server for agents: joining by token, then one WebSocket for each machine. A thin asynchronous shell."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from varuna.core.messages import Beat, Relay
from varuna.core.node_notices import NodeNotice
from varuna.core.version import __version__
from varuna.fleet.manager.mailbox import Pulses
from varuna.fleet.manager.reconcile import Reconciliation, check_belongs, check_speaker
from varuna.fleet.net.agent_session import AgentSession, ChannelFullError, Outgoing
from varuna.fleet.net.beats import BeatMemory
from varuna.fleet.net.connection_limits import welcome
from varuna.fleet.net.host_facts import HostView
from varuna.fleet.net.protocol import (
    BAD_JOB,
    BAD_MESSAGE,
    BAD_TWIN,
    MAX_JOIN_BYTES,
    STALLED,
    Dismiss,
    DownBody,
    DownItem,
    Greet,
    Joined,
    JoinRequest,
    Output,
    Parted,
    Printed,
    ProcessEnded,
    Pulse,
    PulseAnswer,
    Said,
    Started,
    UpBody,
    UpItem,
    Welcome,
    greeting,
    up_frame,
)
from varuna.fleet.net.requests import address_of, bearer, first_problem, read_body
from varuna.fleet.net.source import SOURCE_HEADER, other_source, source
from varuna.fleet.page import answers
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.registry import RefusedError, Registry
from varuna.fleet.run_folder.worker_logs import LogKeeper
from varuna.fleet.state.inputs import (
    ConnectionLost,
    Event,
    MessageReceived,
    NodeParted,
    NoticeReceived,
    WorkerDistrusted,
    WorkerExited,
    WorkerSpawned,
)
from varuna.process.console import warn

ITEMS_WAITING = 4096
"""An agent that leaves this many messages unconfirmed is given up."""
_BURST_FRAMES, _FRAMES_PER_S = 2000.0, 500.0
_BURST_BYTES, _BYTES_PER_S = 64.0 * 2**20, 8.0 * 2**20


class AgentLink:
    """One life of one agent; used on the server's event loop only."""

    def __init__(self, node: str, session: str, now_s: float) -> None:
        self.node = node
        self.session: AgentSession[DownBody] = AgentSession(session, DownItem, ITEMS_WAITING)
        self.workers: set[str] = set()
        self.heard_s = now_s
        self.host = HostView()
        self.beats = BeatMemory()
        self.relay: Relay | None = None
        """The machine's port, where it joins connections of machines that cannot reach each other."""
        self.ended_abruptly = False
        """Its newest connection was ended from the other side, without a goodbye."""
        self.malformed = 0
        """Connections in a row that a malformed message has ended, without an item between them that could be read."""
        self._progress_s = now_s  # newest moment at which nothing waited, or something was confirmed
        self._budget, self._budget_bytes, self._budget_s = _BURST_FRAMES, _BURST_BYTES, now_s

    def connect(self, cursor: int) -> Outgoing[DownBody]:
        """A new connection; the other side has everything up to ``cursor``."""
        self.ended_abruptly, self.beats = False, BeatMemory()
        return self.session.connect(cursor)

    def send(self, body: DownBody, now_s: float) -> None:
        """Queue a message, for this connection or the next one.

        Raises:
            ChannelFullError: nothing was confirmed for too long.
        """
        if not self.session.waiting:
            self._progress_s = now_s
        self.session.send(body)

    def confirm(self, number: int, now_s: float) -> None:
        """Note that the agent has everything up to ``number``.

        Raises:
            ValueError: it was never sent.
        """
        if self.session.confirm(number) or not self.session.waiting:
            self._progress_s = now_s

    def is_stalled(self, now_s: float, patience_s: float) -> bool:
        """Return whether it is silent, or takes in nothing of what it is sent."""
        deaf = bool(self.session.waiting) and now_s - self._progress_s > patience_s
        return deaf or now_s - self.heard_s > patience_s

    def pause_s(self, now_s: float, frame_bytes: int = 0) -> float:
        """Return the seconds to read nothing from who floods us: its TCP window then holds it back, and nobody else."""
        passed_s, self._budget_s = now_s - self._budget_s, now_s
        self._budget = min(_BURST_FRAMES, self._budget + passed_s * _FRAMES_PER_S) - 1
        self._budget_bytes = min(_BURST_BYTES, self._budget_bytes + passed_s * _BYTES_PER_S) - frame_bytes
        return max(0.0, -self._budget / _FRAMES_PER_S, -self._budget_bytes / _BYTES_PER_S)


_GATHER_S = 0.05


class PulseGatherer:
    """Used on one event loop only; what it is given goes on in the same order.

    Args:
        post: takes what happens; returns at once.
    """

    def __init__(self, post: Callable[[Event | Reconciliation | Pulses], None]) -> None:
        self._post = post
        self._pulses: list[tuple[str, Mapping[str, Beat]]] = []

    def add_pulse(self, node: str, beats: Mapping[str, Beat]) -> None:
        """Pass an agent's pulse on, within 50 ms."""
        if not self._pulses:
            asyncio.get_running_loop().call_later(_GATHER_S, self._pass_on)
        self._pulses.append((node, beats))

    def post(self, event: Event | Reconciliation) -> None:
        """Pass an event on at once, after the pulses before it."""
        self._pass_on()
        self._post(event)

    def _pass_on(self) -> None:
        if self._pulses:
            self._post(Pulses(tuple(self._pulses)))
            self._pulses = []


MOST_MALFORMED = 3
"""An agent's workers are given up after so many malformed messages in a row; one may be anybody's mistake."""
PATIENCE_S = 15.0
"""An agent that says nothing, or confirms nothing, for so long is cut; it may come back."""
_GREET_S = 10.0
_MOST_RELAYS = 4  # all are asked at once
_GOODBYE_S = 2.0
_NO_GOODBYE = (1005, 1006)  # agents say 1000 when they end a connection, also one that is silent


class AgentServer:
    """Everything here runs on the server's event loop, but the constructor and ``routes``.

    Args:
        registry: knows who may join.
        certificate_pem: of the run's authority, which everybody may read.
        manager: this life of the manager.
        run: what is managed.
        post: takes what happens, on any thread; returns at once.
        logs: keeps the workers' output.
        audit: hears of refusals.
        write: gets the main worker's standard output.
        return_s: a living agent whose connection broke is back within this time.
        revoked_s: how long one that was drained may go on, for the rest of its logs.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        certificate_pem: str,
        manager: str,
        run: str,
        post: Callable[[Event | Reconciliation | Pulses], None],
        logs: LogKeeper,
        audit: Audit,
        write: Callable[[bytes], None],
        return_s: float = 0.5,
        revoked_s: float = 10.0,
    ) -> None:
        self._return_s, self._revoked_s = return_s, revoked_s
        self._registry, self._certificate_pem, self._pulses = registry, certificate_pem, PulseGatherer(post)
        self._manager, self._run, self._logs, self._audit, self._write = manager, run, logs, audit, write
        self._links: dict[str, AgentLink] = {}
        self._watching: asyncio.Task[None] | None = None
        self._tries: set[asyncio.Task[None]] = set()
        self._main = ""

    def routes(self) -> list[BaseRoute]:
        """The HTTP and WebSocket routes for agents."""
        return [
            Route("/ca", self._get_ca),
            Route("/join", self._join, methods=["POST"]),
            WebSocketRoute("/agent", self._agent),
        ]

    # -- what the manager wants --------------------------------------------------------------------------

    def send(self, node: str, body: DownBody) -> None:
        """Tell an agent, now or when it is back; one that takes nothing in is given up."""
        link = self._links.get(node)
        if link is None:
            return
        try:
            link.send(body, time.monotonic())
        except ChannelFullError as error:
            self._give_up(link, f"its agent does not read its messages ({error})")

    def dismiss(self, node: str | None, reason: str, exit_code: int, *, drained: bool = False) -> None:
        """Send one agent home, or all; one that was drained, and whose secret is void, has a moment to say goodbye."""
        if node is not None and drained:
            asyncio.get_running_loop().call_later(self._revoked_s, self._shut_out, node)
        for name in [node] if node is not None else list(self._links):
            self.send(name, Dismiss(reason=reason, exit_code=exit_code, drained=drained))

    def send_away(self, node: str, why: str) -> None:
        """Drop a machine whose secret is void, and its workers: they are not asked, nor waited for."""
        if (link := self._links.get(node)) is not None:
            for worker in sorted(link.workers):
                self._pulses.post(WorkerDistrusted(worker, why))
            self._give_up(link, why)

    def _shut_out(self, node: str) -> None:
        if (link := self._links.get(node)) is not None:
            self._give_up(link, "its secret was revoked")

    def set_main(self, worker: str) -> None:
        """Show the output of this worker."""
        self._main = worker

    @property
    def connected(self) -> list[str]:
        """Nodes whose agents are there right now; any thread may ask."""
        return [name for name, link in list(self._links.items()) if link.session.connection is not None]

    def hosts(self) -> dict[str, object]:
        """Return what connected machines have told of themselves; any thread may ask."""
        return {
            name: link.host.describe()
            for name, link in list(self._links.items())
            if link.session.connection is not None
        }

    def relays(self) -> tuple[Relay, ...]:
        """Machines that can join connections of others, those that do nothing else first; any thread may ask."""
        now_s = time.monotonic()
        links = [link for link in list(self._links.values()) if now_s - link.heard_s < PATIENCE_S]
        found = sorted(links, key=lambda link: (bool(link.workers), link.node))
        return tuple(link.relay for link in found if link.relay is not None)[:_MOST_RELAYS]

    # -- joining -----------------------------------------------------------------------------------------

    async def _get_ca(self, request: Request) -> Response:
        return PlainTextResponse(self._certificate_pem)

    async def _join(self, request: Request) -> Response:
        """A token for a name and a secret."""
        address = address_of(request)
        body = await read_body(request, MAX_JOIN_BYTES)
        if body is None:
            self._audit.refused("join", address, "the request is too large")
            return answers.error(413, f"the request is larger than {MAX_JOIN_BYTES} bytes")
        try:
            wanted = JoinRequest.model_validate_json(body)
        except ValidationError as error:
            self._audit.refused("join", address, "malformed request")
            return answers.error(422, f"the request is invalid: {first_problem(error)}")
        if wanted.version != __version__:
            is_ours = await asyncio.to_thread(self._registry.knows, wanted.token)
            what = f"it runs Varuna {wanted.version}, the manager {__version__}: install the same there"
            (self._audit.turned_away if is_ours else self._audit.refused)("join", address, what)
            return answers.error(409, f"the manager runs Varuna {__version__}; install the same version here")
        try:
            join = self._registry.join
            node = await asyncio.to_thread(join, wanted.token, wanted.hostname, wanted.secret_sha256)
        except RefusedError as error:
            self._audit.refused("join", address, str(error))
            return answers.error(403, str(error))
        self._audit.did(f"join as {node}", address)
        return JSONResponse(Joined(node=node).model_dump(), 201)

    # -- one connection ----------------------------------------------------------------------------------

    async def _agent(self, websocket: WebSocket) -> None:
        """Serve one agent's connection, from its greeting to its end."""
        node = websocket.query_params.get("node", "")[:64]
        address = websocket.client.host if websocket.client else "unknown"
        try:
            secret = bearer(websocket.headers.get("authorization", ""))
            await asyncio.to_thread(self._registry.check, node, secret)
        except RefusedError as error:
            self._audit.refused("connect an agent", address, str(error))
            # Before it is accepted: frames of a stranger's would be read.
            await websocket.send_denial_response(answers.error(403, str(error)))
            return
        welcome(websocket)
        await websocket.accept(headers=[(SOURCE_HEADER.encode(), source().encode())])
        greet = await self._read_greet(websocket, node)
        if greet is None:
            return
        difference = await asyncio.to_thread(self._registry.agree, greet.job)
        if difference is not None:
            self._audit.turned_away(f"connect agent {node}", address, difference)
            await websocket.close(BAD_JOB, difference[:120])
            return
        before = self._links.get(node)
        if before is not None and before.session.connection is not None:
            if before.session.name != greet.session and time.monotonic() - before.heard_s < 3.0:
                self._audit.refused(
                    f"connect agent {node}", address, "another agent with this identity is already connected"
                )
                await websocket.close(
                    BAD_TWIN, "an agent with this identity is already connected: give each agent its own --state-dir."
                )
                return
            before.session.connection.end("the agent has a new connection")
        await self._converse(websocket, *self._meet(node, greet))

    async def _read_greet(self, websocket: WebSocket, node: str) -> Greet | None:
        try:
            async with asyncio.timeout(_GREET_S):
                frame = await websocket.receive()
            if frame["type"] == "websocket.disconnect":
                return None
            greet = greeting.validate_json(frame.get("text") or "")
            for snapshot in greet.snapshots:
                check_belongs(node, snapshot.worker)
                for message in snapshot.said:
                    check_speaker(snapshot.worker, message)
        except (ValueError, TimeoutError) as error:
            await self._reject(websocket, node, error)
            return None
        return greet

    def _meet(self, node: str, greet: Greet) -> tuple[AgentLink, Outgoing[DownBody]]:
        """Go on where the last connection ended, or begin anew."""
        now_s = time.monotonic()
        link = self._links.get(node)
        resumed = link is not None and link.session.name == greet.session and greet.manager == self._manager
        if link is None or not resumed:
            link = self._links[node] = AgentLink(node, greet.session, now_s)
        else:
            link.confirm(min(greet.received, link.session.sent), now_s)
        connection = link.connect(greet.received if resumed else 0)
        link.relay = greet.relay
        link.heard_s = now_s
        connection.say(
            Welcome(
                manager=self._manager,
                run=self._run,
                resumed=resumed,
                received=link.session.received,
                kept=self._logs.sizes(node),
            )
        )
        if not resumed:
            # Workers of another run are killed by their agent as soon as it hears which run this is.
            snapshots = greet.snapshots if greet.run in ("", self._run) else ()
            link.workers = {snapshot.worker for snapshot in snapshots if snapshot.exited is None}
            for worker in link.workers:
                self._logs.begin_log(worker)
            self._pulses.post(Reconciliation(node, snapshots))
            if greet.relay is not None:
                self._tries.add(task := asyncio.create_task(_try_port(node, greet.relay)))
                task.add_done_callback(self._tries.discard)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return link, connection

    async def _converse(self, websocket: WebSocket, link: AgentLink, connection: Outgoing[DownBody]) -> None:
        sending = asyncio.create_task(_send_all(websocket, connection))
        receiving = asyncio.create_task(self._receive_all(websocket, link, connection))
        ending = asyncio.create_task(connection.ended())  # one that neither reads nor speaks holds both others up
        try:
            await asyncio.wait([sending, receiving, ending], return_when=asyncio.FIRST_COMPLETED)
            if connection.cut:
                warn(f"closing the connection of agent {link.node}: {connection.cut}")
                with contextlib.suppress(TimeoutError, RuntimeError, WebSocketDisconnect):
                    async with asyncio.timeout(_GOODBYE_S):
                        await websocket.close(STALLED, connection.cut)
        finally:
            for task in (sending, receiving, ending):
                task.cancel()
            if link.session.connection is connection:
                link.session.connection = None
                asyncio.get_running_loop().call_later(self._return_s, self._conclude, link)

    def _conclude(self, link: AgentLink) -> None:
        """An agent that has not come back by now is gone, or cannot reach us: others have to say which."""
        if self._links.get(link.node) is link and link.session.connection is None:
            self._pulses.post(NodeParted(link.node, abruptly=link.ended_abruptly))

    async def _receive_all(self, websocket: WebSocket, link: AgentLink, connection: Outgoing[DownBody]) -> None:
        try:
            while not connection.cut:
                frame = await websocket.receive()
                if frame["type"] == "websocket.disconnect":
                    link.ended_abruptly = frame.get("code") in _NO_GOODBYE and not connection.cut
                    return
                now_s = time.monotonic()
                text = frame.get("text") or ""
                self._take(link, connection, text, now_s)
                if pause_s := link.pause_s(now_s, len(text)):
                    await asyncio.sleep(pause_s)
        except ValueError as error:  # a ValidationError is one
            link.malformed += 1
            if link.malformed == MOST_MALFORMED:
                self._give_up(link, f"its agent sent {MOST_MALFORMED} malformed messages in a row")
            await self._reject(websocket, link.node, error)

    def _take(self, link: AgentLink, connection: Outgoing[DownBody], text: str, now_s: float) -> None:
        """Handle one frame of an agent.

        Raises:
            ValueError: it cannot be.
        """
        frame = up_frame.validate_json(text)
        link.heard_s = now_s
        link.confirm(frame.received, now_s)
        match frame:
            case Pulse(asks=asks, beats=beats, clock_s=clock_s, host=host):
                if clock_s is not None:
                    link.host.note_pulse(clock_s - time.time(), host)
                if asks:
                    connection.say(PulseAnswer(received=link.session.received))
                for worker in beats:
                    check_belongs(link.node, worker)
                self._pulses.add_pulse(link.node, link.beats.restore(beats))
            case UpItem(number=number, body=body):
                if link.session.accept(number):
                    self._note(link, body)
                    link.malformed = 0

    def _note(self, link: AgentLink, body: UpBody) -> None:
        """Pass on what an agent says."""
        if isinstance(body, NodeNotice):
            self._pulses.post(NoticeReceived(link.node, body))
            return
        check_belongs(link.node, body.worker)
        match body:
            case Started(worker=worker):
                link.workers.add(worker)
                self._logs.begin_log(worker)
                self._pulses.post(WorkerSpawned(worker, node=link.node))
            case Said(worker=worker, message=message):
                check_speaker(worker, message)
                self._pulses.post(MessageReceived(worker, message))
            case Parted(worker=worker):
                self._pulses.post(ConnectionLost(worker))
            case ProcessEnded(worker=worker, exited=exited):
                link.workers.discard(worker)
                self._pulses.post(WorkerExited(worker, exited.code, exited.stderr_tail, exited.is_oom))
            case Output():
                self._logs.write(body)
            case Printed(worker=worker, data=data):
                if worker == self._main:
                    self._write(data)

    # -- those that misbehave ----------------------------------------------------------------------------

    async def _reject(self, websocket: WebSocket, node: str, error: Exception) -> None:
        """Say what was wrong, in the journal and to the other side, and close."""
        why = first_problem(error) if isinstance(error, ValidationError) else str(error) or "it was silent"
        why = other_source(source(), websocket.headers.get(SOURCE_HEADER, "")) or f"malformed: {why}"
        self._audit.refused(f"speak as agent {node}", websocket.client.host if websocket.client else "unknown", why)
        if websocket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(TimeoutError, RuntimeError, WebSocketDisconnect):
                async with asyncio.timeout(_GOODBYE_S):
                    await websocket.close(BAD_MESSAGE, why[:120])

    def _give_up(self, link: AgentLink, why: str) -> None:
        """Forget this life of an agent: its workers are lost, and killed if it comes back."""
        if self._links.get(link.node) is link:
            del self._links[link.node]
        if link.session.connection is not None:
            link.session.connection.end(why)
        for worker in link.workers:
            self._pulses.post(ConnectionLost(worker))

    async def _watch(self) -> None:
        """Cut connections that are open in name only."""
        while True:
            await asyncio.sleep(1.0)
            now_s = time.monotonic()
            for link in list(self._links.values()):
                if link.session.connection is not None and link.is_stalled(now_s, PATIENCE_S):
                    link.session.connection.end("it is silent, or does not read its messages")


async def _try_port(node: str, port: Relay) -> None:
    """Say so, if nobody answers at the port that a machine announces."""
    try:
        async with asyncio.timeout(_GREET_S):
            _, writer = await asyncio.open_connection(port.host, port.port)
        writer.close()
    except (OSError, TimeoutError) as error:
        warn(
            f"machine {node} announces {port.host}:{port.port}, where nothing answers this manager "
            f"({error or 'it is silent'}): is the port mapped, and open in its firewall? Other machines call it in "
            "vain, and are called back, or relayed"
        )


async def _send_all(websocket: WebSocket, connection: Outgoing[DownBody]) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: the receiving side has closed it
        await connection.send_all(websocket.send_text)
