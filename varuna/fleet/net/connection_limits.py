"""Limits on unauthenticated connections: there may be few, and each has little time for its request.

A connection is a stranger's until it has brought one whole request; what it costs before that (memory, a descriptor)
nobody has to show a secret for. Many strangers from one address cannot crowd out those from others.
"""

import asyncio
import ipaddress
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import h11
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from varuna.process.console import warn

_DENIED = "ASGI callable returned without completing handshake."  # what uvicorn says of each refused WebSocket


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many strangers there may be, and how long each has."""

    most: int = 1024
    """strangers at once"""
    most_of_one: int = 256
    """the same, of one address"""
    request_s: float = 10.0
    """for a whole request, or the first word of a TLS handshake"""
    handshake_s: float = 10.0
    """for the rest of the handshake"""


class StrangerLimits:
    """Counts strangers; for one event loop."""

    def __init__(self, bounds: ConnectionLimits) -> None:
        self.bounds = bounds
        self._strangers: dict[object, tuple[str, asyncio.TimerHandle, asyncio.Transport]] = {}  # the first came first
        self._origins: Counter[str] = Counter()

    def admit(self, who: object, address: str, transport: asyncio.Transport) -> None:
        """Count a stranger, new or back for another request; without a whole request in time the connection is cut."""
        self.release(who)
        origin = origin_of(address)
        is_full = len(self._strangers) >= self.bounds.most
        if self._origins[origin] >= self.bounds.most_of_one or (is_full and not self._evict(origin)):
            transport.abort()
            return
        timer = asyncio.get_running_loop().call_later(self.bounds.request_s, transport.abort)
        self._strangers[who] = origin, timer, transport
        self._origins[origin] += 1

    def release(self, who: object) -> None:
        """Stop counting a connection that has brought its request, or is gone."""
        if who in self._strangers:
            origin, timer, _ = self._strangers.pop(who)
            timer.cancel()
            self._origins[origin] -= 1
            if not self._origins[origin]:
                del self._origins[origin]

    def _evict(self, origin: str) -> bool:
        """Cut the oldest stranger from the most crowded address; False if the newcomer is from there."""
        crowded, count = self._origins.most_common(1)[0]
        if count <= self._origins[origin] + 1:
            return False
        who = next(who for who, (of, _, _) in self._strangers.items() if of == crowded)
        transport = self._strangers[who][2]
        self.release(who)
        transport.abort()
        return True


def origin_of(address: str) -> str:
    """The part of an address that counts: with IPv6, one machine has 2**64 of them."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


class GuardedProtocol(H11Protocol):
    """One connection of uvicorn's; overrides internals of it, which ``tests/unit/fleet/net/test_connection_limits.py``
    watches.
    """

    def __init__(self, *args: Any, limits: StrangerLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Count a new connection."""
        super().connection_made(transport)
        self._meet()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._limits.release(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """What it said may be a whole request."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._limits.release(self)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """It is a whole request, for a connection that is somebody else's business."""
        self._limits.release(self)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """It may want something else."""
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._meet()

    def _meet(self) -> None:
        address = self.client[0] if self.client else ""
        self._limits.admit(self, address, self.transport)


class Quiet(logging.Handler):
    """Takes uvicorn's log: garbage from outside is ignored, and an error of our own is reported in one line, once."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record that no outsider can cause."""
        error = record.exc_info[1] if record.exc_info else None
        what = type(error).__name__ if error is not None else record.getMessage()
        is_no_news = isinstance(error, h11.ProtocolError | ClientDisconnect | ConnectionError) or what == _DENIED
        if is_no_news or what in self._told:
            return
        self._told.add(what)
        warn(f"a request failed with an unexpected error: {error or record.getMessage()!r}")
