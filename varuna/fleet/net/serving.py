"""A web application in a thread of its own, on one port, with or without TLS."""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from websockets.protocol import State
from websockets.server import ServerProtocol

from varuna.core.errors import FleetError
from varuna.fleet.net.connection_limits import (
    ConnectionLimits,
    GuardedProtocol,
    GuardedWebSocket,
    Quiet,
    StrangerLimits,
)
from varuna.fleet.net.watchdog import Watchdog

_GOODBYE_S = 2.0


class Handshake(asyncio.Protocol):
    """Makes way for a protocol of ``make`` over TLS; for one connection, used on the event loop only."""

    def __init__(self, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext, limits: StrangerLimits) -> None:
        self._make, self._tls, self._limits = make, tls, limits
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._hello, self._early = b"", b""  # before TLS began; with the end of the handshake
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is one over TCP
        """Count a new connection."""
        self._transport = transport
        self._limits.admit(transport)

    def data_received(self, data: bytes) -> None:
        """The first words begin the handshake."""
        assert self._transport is not None
        if self._task is not None:
            self._early += data
        elif not self._transport.is_closing():
            self._transport.pause_reading()
            self._hello = data
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._shake_hands(self._transport))
            # After the task's first step, and after what that schedules: TLS has taken the connection over by then.
            loop.call_soon(loop.call_soon, self._say_hello, self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._is_lost = True
        if self._transport is not None:
            self._limits.release(self._transport)

    def _say_hello(self, transport: asyncio.Transport) -> None:
        """Hand TLS what was read before it listened."""
        if transport.is_closing():
            return
        listener, hello = cast(asyncio.BufferedProtocol, transport.get_protocol()), memoryview(self._hello)
        while hello:
            buffer = memoryview(listener.get_buffer(len(hello)))
            count = min(len(buffer), len(hello))
            buffer[:count] = hello[:count]
            listener.buffer_updated(count)
            hello = hello[count:]

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._limits.bounds.handshake_s,
                ssl_shutdown_timeout=_GOODBYE_S,
            )
        except OSError:  # an SSLError is one, and so is a TimeoutError
            return
        finally:
            self._limits.release(transport)
        if secured is None or self._is_lost:
            return
        protocol = self._make()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        if self._early:
            protocol.data_received(self._early)


BACKLOG = 4096
_OPEN_FILES = 65536
START_S = 10.0
_STOP_S = 5.0


class Serving:
    """A port that an application is served on, by an event loop that nobody else uses; any thread may call this.

    What it serves comes with ``start``: by then whoever answers there may know of the port.

    Args:
        port: 0 picks a free one.
        max_frame_bytes: of a WebSocket's message.
        host: address to listen on.
        tls: speaks TLS with it.
        limits: on connections that have not shown a secret.
        start_s: how long the event loop may take to start.
        loop_factory: makes the event loop. Default: uvloop's, where it is installed.

    Raises:
        FleetError: the port is taken, or the address is not one of this machine.
    """

    def __init__(
        self,
        *,
        port: int,
        max_frame_bytes: int,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        limits: ConnectionLimits | None = None,
        start_s: float = START_S,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self._start_s = start_s
        self._limits, self._loop_factory = limits or ConnectionLimits(), loop_factory or _fastest_loop()
        self._socket = bind(host, port)
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog = Watchdog()
        self._ready = threading.Event()
        self._max_frame_bytes, self._tls = max_frame_bytes, tls
        self._uvicorn: _Uvicorn | None = None
        self._thread = threading.Thread(target=self._run, name="varuna-server", daemon=True)

    @property
    def ran_s(self) -> float | None:
        """The newest moment at which it could hear anybody (``time.monotonic``); None while it does not serve."""
        return self._watchdog.ran_s

    def start(self, app: ASGIApp) -> None:
        """Serve ``app`` from now on.

        Raises:
            FleetError: the thread's event loop did not start in time.
        """
        self._uvicorn = _uvicorn(app, self._max_frame_bytes, self._tls, self._limits)
        self._thread.start()
        if not self._ready.wait(self._start_s):
            raise FleetError(
                f"the event loop of the server at {self.host}:{self.port} did not start within {self._start_s:.0f} s. "
                "Is this machine short of memory, processes or open files? Look at `ulimit -a`."
            )

    def stop(self) -> None:
        """Close all connections; returns once the thread is gone, or after 5 s."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._socket.close()

    def call(self, work: Callable[..., object], *args: object) -> None:
        """Run ``work`` soon on the loop; nothing happens if it is gone."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended just now
                self._loop.call_soon_threadsafe(work, *args)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        assert self._uvicorn is not None
        self._loop = asyncio.get_running_loop()
        # A connection that breaks in the middle of a goodbye is not worth a line on the terminal.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._watchdog.start(self._loop)
        self._ready.set()
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            self._watchdog.stop()


class _Uvicorn(uvicorn.Server):
    """Uvicorn with bounds on the time and number of TLS handshakes, where it would give a silent client a minute.

    Overrides an internal of uvicorn; ``tests/unit/fleet/net/test_tls.py`` would see it change.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, limits: StrangerLimits) -> None:
        super().__init__(config)
        self._tls, self._limits = tls, limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        config, loop = self.config, asyncio.get_running_loop()
        await self.lifespan.startup()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        def first() -> asyncio.Protocol:
            return protocol() if self._tls is None else Handshake(protocol, self._tls, self._limits)

        self.servers = [await loop.create_server(first, sock=one, backlog=config.backlog) for one in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections; one that is half closed, by somebody who does not read, would make uvicorn fail."""
        for connection in list(self.server_state.connections):
            protocol = getattr(connection, "conn", None)
            if isinstance(protocol, ServerProtocol) and protocol.state is State.CLOSING:
                self.server_state.connections.discard(connection)
                connection.transport.abort()
        await super().shutdown(sockets)


def _uvicorn(app: ASGIApp, max_frame_bytes: int, tls: ssl.SSLContext | None, bounds: ConnectionLimits) -> _Uvicorn:
    limits = StrangerLimits(bounds.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    config = uvicorn.Config(
        app,
        http=partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]  # it is called as a class is
        ws=partial(GuardedWebSocket, limits=limits),  # type: ignore[arg-type]  # it is called as a class is
        ws_max_size=max_frame_bytes,
        ws_ping_interval=None,  # leases decide who is alive
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=1,
    )
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.ERROR)
    logger.handlers, logger.propagate = [Quiet()], False
    return _Uvicorn(config, tls, limits)


def raise_open_files() -> None:
    """A thousand agents need more descriptors than a shell's usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is an error here and not in the server's thread."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # only now is a taken port certain to be an error
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise FleetError(
                f"port {port} on {host} cannot be used ({error.strerror}). Pass another --port, or leave it out to "
                "use a free one."
            ) from error
        raise FleetError(
            f"cannot listen on {host} ({error.strerror}). Pass an address of this machine with --host, or 0.0.0.0 "
            "for all."
        ) from error
    return listener


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """An event loop of uvloop, where it is installed: it takes a third of the memory with a thousand connections."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made
