"""A connection until its TLS is there.

It counts as a stranger's from its first moment on, and not only once its handshake is done: somebody who opens
connections and says nothing on them would otherwise take as many descriptors as there are. What TLS costs, memory above
all, is spent on those that have said something.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from varuna.fleet.net.connection_limits import StrangerLimits

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
