"""The server for workers: a WebSocket per worker of this machine. A thin asynchronous shell."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from varuna.core.messages import MAX_FRAME_BYTES, Hello, ToWorker, from_worker
from varuna.fleet.net.connection_limits import welcome
from varuna.fleet.net.requests import bearer, is_same_token
from varuna.fleet.net.serving import Serving
from varuna.fleet.state.inputs import ConnectionLost, MessageReceived
from varuna.process.console import warn

QUEUE_FRAMES = 1024  # a worker that reads nothing for so long is gone
_LAST_WORDS_S = 5.0
_BAD_MESSAGE, _BAD_NAME = 4400, 4409


Outbox = asyncio.Queue[str | None]


class WorkerServer:
    """Serves in a thread with its own event loop; ``send`` and ``stop`` may be called by any thread.

    Args:
        port: 0 picks a free one.
        token: what workers must know.
        is_ours: whether a worker of this name was started here: whatever a worker starts inherits the token. Is asked
            on the server's thread.
        on_event: gets what workers say, on the server's thread; must return at once.
        host: address to listen on.

    Raises:
        FleetError: the port is taken.
    """

    def __init__(
        self,
        *,
        port: int,
        token: str,
        is_ours: Callable[[str], bool],
        on_event: Callable[[MessageReceived | ConnectionLost], None],
        host: str = "127.0.0.1",
        queue_frames: int = QUEUE_FRAMES,
    ) -> None:
        self._queue_frames = queue_frames
        self._token, self._is_ours, self._on_event = token, is_ours, on_event
        self._outboxes: dict[str, Outbox] = {}  # touched on the server's loop only
        self._serving = Serving(host=host, port=port, max_frame_bytes=MAX_FRAME_BYTES)
        self.host, self.port, self.stop = self._serving.host, self._serving.port, self._serving.stop

    def start(self, routes: Sequence[BaseRoute] = ()) -> None:
        """Let workers in from now on; ``routes`` are what else this port offers.

        Raises:
            FleetError: the server's event loop did not start in time.
        """
        self._serving.start(Starlette(routes=[WebSocketRoute("/worker", self._worker), *routes]))

    @property
    def ran_s(self) -> float | None:
        """The newest moment at which it could hear anybody (``time.monotonic``); None while it does not serve."""
        return self._serving.ran_s

    @property
    def worker_url(self) -> str:
        """Address to which workers connect."""
        return f"ws://{self.host}:{self.port}/worker"

    def send(self, worker: str, message: ToWorker) -> None:
        """Queue a message; one to a worker without a connection is dropped, since its loss is known or will be."""
        self._serving.call(self._queue, worker, message.model_dump_json())

    # -- on the server's loop ----------------------------------------------------------------------------------

    def _queue(self, worker: str, frame: str) -> None:
        outbox = self._outboxes.get(worker)
        if outbox is None:
            return
        if outbox.full():
            outbox.get_nowait()  # room for the end
            outbox.put_nowait(None)
            del self._outboxes[worker]
            warn(f"worker {worker} does not read its messages: closing its connection")
            self._on_event(ConnectionLost(worker))
        else:
            outbox.put_nowait(frame)

    async def _worker(self, websocket: WebSocket) -> None:
        """One worker's connection, from its first frame to its end."""
        name = websocket.query_params.get("worker", "")
        if not is_same_token(bearer(websocket.headers.get("authorization", "")), self._token):
            warn(f"a connection from {websocket.client} with a wrong token was refused")
            await websocket.send_denial_response(PlainTextResponse("wrong token", 403))
            return
        if not self._is_ours(name):
            warn(f"a connection for worker {name[:64]!r} was refused: no worker of that name was started here")
            await websocket.send_denial_response(PlainTextResponse("no worker of this name was started here", 403))
            return
        welcome(websocket)
        await websocket.accept()
        if name in self._outboxes:
            warn(f"a second connection for worker {name} was refused")
            await websocket.close(_BAD_NAME, f"worker {name} is already connected")
            return
        outbox = self._outboxes[name] = asyncio.Queue(self._queue_frames)
        sending = asyncio.create_task(_send_all(websocket, outbox))
        receiving = asyncio.create_task(self._receive_all(websocket, name))
        try:
            await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
            if self._outboxes.get(name) is outbox:  # it is gone, but its last words may wait to be read
                await asyncio.wait([receiving], timeout=_LAST_WORDS_S)
        finally:
            sending.cancel()
            receiving.cancel()
            if self._outboxes.get(name) is outbox:
                del self._outboxes[name]
                self._on_event(ConnectionLost(name))

    async def _receive_all(self, websocket: WebSocket, name: str) -> None:
        """Pass on what the worker says until it stops, or says something that cannot be."""
        try:
            while True:
                frame = await websocket.receive()  # receive_text refuses to read on once a send has failed
                if frame["type"] == "websocket.disconnect":
                    return
                message = from_worker.validate_json(frame.get("text") or "")
                if isinstance(message, Hello) and message.worker != name:
                    raise ValueError(f"worker {name} claims to be {message.worker}")
                self._on_event(MessageReceived(name, message))
        except ValueError as error:  # a ValidationError is one
            warn(f"worker {name} sent a malformed message: {error}")
            if websocket.application_state is WebSocketState.CONNECTED:
                await websocket.close(_BAD_MESSAGE, "malformed message")


async def _send_all(websocket: WebSocket, outbox: Outbox) -> None:
    """Send until the end mark; the transport's own flow control holds back a slow receiver's frames here."""
    try:
        while (frame := await outbox.get()) is not None:
            await websocket.send_text(frame)
    except (WebSocketDisconnect, RuntimeError):  # RuntimeError: the receiving side has closed it
        return
