"""Text frames of WebSockets, of which a manager gets thousands a second: each goes straight to who takes it.

uvicorn's way, a queue and a task that wakes for each message, costs several times what a heartbeat needs.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import apply_mask  # type: ignore[attr-defined]  # it picks the one written in C
from websockets.http11 import Request

Take = Callable[[str], float]
"""Takes one frame; returns for how many seconds nothing more should be read."""

_NAME = "varuna.short_cut"
_WHOLE_TEXT, _MASKED = 0x81, 0x80


class ShortCut(WebSocketsSansIOProtocol):
    """One connection of uvicorn's; what is no whole text frame goes its usual way.

    Overrides internals, which ``tests/unit/fleet/net/test_short_cut.py`` watches.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.take: Take | None = None
        """set while frames go straight to it"""
        self.fault: Exception | None = None
        """raised by ``take``"""
        self._rest = bytearray()  # the beginning of a frame
        self._pausing: asyncio.TimerHandle | None = None

    def handle_connect(self, event: Request) -> None:
        """Let the application find this connection."""
        super().handle_connect(event)
        if not self.close_sent:
            self.scope.setdefault("extensions", {})[_NAME] = {"connection": self}

    def data_received(self, data: bytes) -> None:
        """Split what comes after the request into frames."""
        if not self.handshake_initiated:
            super().data_received(data)
            return
        came: bytes | bytearray = data
        if self._rest:
            self._rest += data
            came, self._rest = self._rest, bytearray()
        start = 0
        while (found := frame_at(came, start)) is not None:
            body, end = found
            if is_too_large := end - body > self.config.ws_max_size:
                end = len(came)  # refused by its head
            if end > len(came):
                break
            is_usual = is_too_large or came[start] != _WHOLE_TEXT or not came[start + 1] & _MASKED
            if self.take is not None and not is_usual:
                self._hear(came[body:end], came[body - 4 : body])
            else:
                super().data_received(bytes(came[start:end]))
            start = end
        if start < len(came):
            self._rest = bytearray(came[start:])

    def _hear(self, body: bytes | bytearray, mask: bytes | bytearray) -> None:
        assert self.take is not None
        try:
            pause_s = self.take(apply_mask(body, mask).decode())
        except Exception as error:  # noqa: BLE001 - raised by receive_all, which is woken
            self.take, self.fault = None, error
            self.queue.put_nowait({"type": "websocket.receive", "text": ""})
            return
        if pause_s:
            self.transport.pause_reading()
            if self._pausing is not None:
                self._pausing.cancel()
            self._pausing = self.loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()


def frame_at(data: bytes | bytearray, start: int) -> tuple[int, int] | None:
    """Where the body of the frame at ``start`` begins and ends (RFC 6455, 5.2); None if its head is not all here."""
    if len(data) < start + 2:
        return None
    second, body = data[start + 1], start + 2
    length = second & 127
    if length > 125:
        body += 2 if length == 126 else 8
        length = int.from_bytes(data[start + 2 : body], "big")
    body += 4 if second & _MASKED else 0
    return (body, body + length) if body <= len(data) else None


async def receive_all(websocket: WebSocket, take: Take) -> int:
    """Give all text frames to ``take``, in order; returns the code with which the connection was closed.

    Where no ``ShortCut`` serves, as in a test without sockets, each goes the usual way.

    Raises:
        Exception: what ``take`` raises; nothing is taken after that.
    """
    connection: ShortCut | None = websocket.scope.get("extensions", {}).get(_NAME, {}).get("connection")
    try:
        while True:
            frame = await websocket.receive()
            if connection is not None and connection.fault is not None:
                raise connection.fault
            if frame["type"] == "websocket.disconnect":
                code: int = frame.get("code", 1005)
                return code
            if pause_s := take(frame.get("text") or ""):
                await asyncio.sleep(pause_s)
            if connection is not None and connection.queue.empty():
                connection.take = take  # from now on
    finally:
        if connection is not None:
            connection.take = None
