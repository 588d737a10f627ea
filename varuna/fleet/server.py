"""The manager's only door: a WebSocket per worker, ``/status``, and the web page. A thin asynchronous shell."""

import asyncio
import errno
import logging
import math
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from varuna.core.errors import FleetError
from varuna.core.messages import Hello, ToWorker, from_worker
from varuna.fleet.events import ConnectionLost, MessageReceived
from varuna.fleet.member import MAX_FRAME_BYTES

_QUEUE_FRAMES = 1024  # a worker that reads nothing for so long is gone
_LAST_WORDS_S = 5.0
_COOKIE = "varuna_token"
_PAGE = Path(__file__).parent.parent / "dashboard" / "index.html"
_BAD_MESSAGE, _BAD_TOKEN, _BAD_NAME = 4400, 4401, 4409

log = logging.getLogger(__name__)

Outbox = asyncio.Queue[str | None]


class Server:
    """Serves in a thread with its own event loop; ``send`` and ``stop`` may be called by any thread.

    Args:
        port: 0 picks a free one.
        token: what workers must know. Readers of the page get another one, with which they can change nothing.
        on_event: gets what workers say, on the server's thread; must return at once.
        status: the answer of ``/status``.

    Raises:
        FleetError: the port is taken.
    """

    def __init__(
        self,
        *,
        port: int,
        token: str,
        on_event: Callable[[MessageReceived | ConnectionLost], None],
        status: Callable[[], dict[str, object]],
        host: str = "127.0.0.1",
    ) -> None:
        self._token, self._on_event, self._status = token, on_event, status
        self._page_token = secrets.token_urlsafe(16)
        self._outboxes: dict[str, Outbox] = {}  # touched on the server's loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._socket = _bind(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        app = Starlette(
            routes=[
                WebSocketRoute("/worker", self._worker),
                Route("/status", self._get_status),
                Route("/", self._get_page),
            ]
        )
        config = uvicorn.Config(
            app,
            ws="websockets-sansio",
            ws_max_size=MAX_FRAME_BYTES,
            ws_ping_interval=None,  # leases decide who is alive
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="varuna-server", daemon=True)

    @property
    def worker_url(self) -> str:
        """Where workers connect."""
        return f"ws://{self.host}:{self.port}/worker"

    @property
    def page_url(self) -> str:
        """Where people look."""
        return f"http://{self.host}:{self.port}/?token={self._page_token}"

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Close all connections; returns once the thread is gone."""
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._socket.close()

    def send(self, worker: str, message: ToWorker) -> None:
        """Queue a message; one to a worker without a connection is dropped, since its loss is known or will be."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._queue, worker, message.model_dump_json())

    # -- on the server's loop ----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._uvicorn.serve(sockets=[self._socket])

    def _queue(self, worker: str, frame: str) -> None:
        outbox = self._outboxes.get(worker)
        if outbox is None:
            return
        if outbox.full():
            outbox.get_nowait()  # room for the end
            outbox.put_nowait(None)
            del self._outboxes[worker]
            log.warning("worker %s does not read what it is sent: its connection is dropped", worker)
            self._on_event(ConnectionLost(worker, "it does not read what it is sent"))
        else:
            outbox.put_nowait(frame)

    async def _worker(self, websocket: WebSocket) -> None:
        """One worker's connection, from its first frame to its end."""
        await websocket.accept()
        name = websocket.query_params.get("worker", "")
        given = websocket.headers.get("authorization", "").removeprefix("Bearer ")
        if not _same(given, self._token):
            log.warning("a connection from %s with a wrong token was refused", websocket.client)
            await websocket.close(_BAD_TOKEN, "wrong token")
            return
        if not name or name in self._outboxes:
            log.warning("a second connection for worker %r was refused", name)
            await websocket.close(_BAD_NAME, f"worker {name!r} is connected already, or has no name")
            return
        outbox = self._outboxes[name] = asyncio.Queue(_QUEUE_FRAMES)
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
                    raise ValueError(f"worker {name} says that it is {message.worker}")
                self._on_event(MessageReceived(name, message))
        except ValueError as error:  # a ValidationError is one
            log.warning("worker %s sent a malformed message: %s", name, error)
            if websocket.application_state is WebSocketState.CONNECTED:
                await websocket.close(_BAD_MESSAGE, "malformed message")

    def _may_read(self, request: Request) -> bool:
        return _same(request.query_params.get("token", request.cookies.get(_COOKIE, "")), self._page_token)

    async def _get_status(self, request: Request) -> Response:
        if not self._may_read(request):
            return PlainTextResponse("wrong token\n", status_code=401)
        return JSONResponse(_finite(self._status()))

    async def _get_page(self, request: Request) -> Response:
        """The page; its own requests carry the token in a cookie."""
        if not self._may_read(request):
            return PlainTextResponse("open the address that `varuna run` printed, token included\n", status_code=401)
        if not _PAGE.exists():
            return PlainTextResponse("this installation has no web page; see /status\n", status_code=404)
        page = HTMLResponse(_PAGE.read_text())
        page.set_cookie(_COOKIE, self._page_token, httponly=True, samesite="strict")
        return page


async def _send_all(websocket: WebSocket, outbox: Outbox) -> None:
    """Send until the end mark; the transport's own flow control holds back a slow receiver's frames here."""
    try:
        while (frame := await outbox.get()) is not None:
            await websocket.send_text(frame)
    except (WebSocketDisconnect, RuntimeError):  # RuntimeError: the receiving side has closed it
        return


def _same(given: str, token: str) -> bool:
    """Compare without telling by the time it takes how much was right."""
    return secrets.compare_digest(given.encode(), token.encode())


def _finite(value: object) -> object:
    """JSON has no NaN."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is an error here and not in the server's thread."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # only now is a taken port certain to be an error
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise FleetError(
                f"port {port} on {host} cannot be used ({error.strerror}). Give another --port, or leave it out "
                f"for a free one."
            ) from error
        raise
    return listener
