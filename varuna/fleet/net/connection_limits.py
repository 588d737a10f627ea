"""Limits on unauthenticated connections: there may be few, and each has little time.

A connection is a stranger's until a secret that it has shown is accepted (``welcome``); what it costs until then
(memory, a descriptor) is anybody's to cause. A stranger has ``request_s`` for the head of its request, and as long
again until it has read the whole answer. Many strangers from one address cannot crowd out those from others, nor can
those of one user of this machine.
"""

import asyncio
import ipaddress
import logging
import socket
import struct
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import h11
from starlette.requests import ClientDisconnect, HTTPConnection
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from varuna.process.console import warn

_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_QUESTION = struct.Struct("=BBBxI")  # struct inet_diag_req_v2: family, protocol, extensions, states
_SOCKET = struct.Struct("!HH16s16s12s")  # struct inet_diag_sockid: ports, addresses, interface and cookie
_ANSWER = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: user and inode
_ANY_INTERFACE_AND_COOKIE = b"\0" * 4 + b"\xff" * 8

Address = tuple[str, int]
"""A host's address and a port."""


def user_of(peer: Address, own: Address) -> int | None:
    """The user whose process has the other end of a connection; one look-up of the kernel's, which waits for nobody.

    Args:
        peer: of the other end.
        own: of this end.

    Returns:
        Its number; None: the other end is on another machine or in another network namespace, nobody has it any more,
        or this system does not say.
    """
    try:
        family, there = _packed(peer[0])
        _, here = _packed(own[0])
        asked = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        asked += _SOCKET.pack(peer[1], own[1], there, here, _ANY_INTERFACE_AND_COOKIE)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # it has answered before ``send`` returns
            kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 0, 0) + asked)
            answer = kernel.recv(4096)
    except (OSError, ValueError, AttributeError):  # AttributeError: not Linux
        return None
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return user if inode else None  # of a socket that was closed, the kernel does not know the user any more


def _packed(address: str) -> tuple[int, bytes]:
    """Family of an address, and its bytes."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    return (socket.AF_INET if found.version == 4 else socket.AF_INET6), found.packed


_WELCOME = "varuna.welcome"
_LOOPBACK = "127.0.0.0/8"
_SHARE = 4  # of the open files that this process may have, strangers take one in so many at most
_DENIED = "ASGI callable returned without completing handshake."  # what uvicorn says of each refused WebSocket


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds on strangers: their number, and the seconds that each has."""

    most: int = 1024
    """strangers at once"""
    most_of_one: int = 256
    """the same, of one address, or of one user of this machine"""
    request_s: float = 10.0
    """for the head of a request, or the first word of a TLS handshake; and again for the body with the answer"""
    handshake_s: float = 10.0
    """for the rest of the handshake"""

    def within(self, open_files: int) -> "ConnectionLimits":
        """The same in a process that may have so many open files: most of them are left to those with a secret."""
        most = min(self.most, max(2, open_files // _SHARE))
        return replace(self, most=most, most_of_one=min(self.most_of_one, max(1, most // 2)))


class StrangerLimits:
    """Counts strangers by their connections; for one event loop."""

    def __init__(self, bounds: ConnectionLimits) -> None:
        self.bounds = bounds
        self._strangers: dict[asyncio.Transport, tuple[str, asyncio.TimerHandle]] = {}  # the first came first
        self._origins: Counter[str] = Counter()

    def __contains__(self, transport: object) -> bool:
        """Return whether a connection is a stranger's."""
        return transport in self._strangers

    def admit(self, transport: asyncio.Transport) -> None:
        """Count a stranger, and cut its connection if this is not called again, or it released, in time.

        One that is counted already keeps its place, and its time begins again.
        """
        if transport in self._strangers:
            origin, timer = self._strangers[transport]
            timer.cancel()
        else:
            origin = _origin(transport)
            is_full = len(self._strangers) >= self.bounds.most
            if self._origins[origin] >= self.bounds.most_of_one or (is_full and not self._evict(origin)):
                transport.abort()
                return
            self._origins[origin] += 1
        timer = asyncio.get_running_loop().call_later(self.bounds.request_s, transport.abort)
        self._strangers[transport] = origin, timer

    def release(self, transport: asyncio.Transport) -> None:
        """Stop counting a connection that has shown a secret, or is gone."""
        if transport in self._strangers:
            origin, timer = self._strangers.pop(transport)
            timer.cancel()
            self._origins[origin] -= 1
            if not self._origins[origin]:
                del self._origins[origin]

    def _evict(self, origin: str) -> bool:
        """Cut the oldest stranger from the most crowded address; False if the newcomer is from there."""
        crowded, count = self._origins.most_common(1)[0]
        if count <= self._origins[origin] + 1:
            return False
        transport = next(each for each, (of, _) in self._strangers.items() if of == crowded)
        self.release(transport)
        transport.abort()
        return True


def _origin(transport: asyncio.Transport) -> str:
    """Return the origin that counts: a user of this machine, whatever address they use, or an address of another."""
    peer, own = (transport.get_extra_info(name) for name in ("peername", "sockname"))
    if not isinstance(peer, tuple) or not isinstance(own, tuple):
        return ""
    origin = origin_of(peer[0])
    is_local = origin == _LOOPBACK or peer[0] == own[0]
    user = user_of(peer[:2], own[:2]) if is_local else None
    return origin if user is None else f"user {user}"


def origin_of(address: str) -> str:
    """The part of an address that counts: with IPv6, one machine has 2**64 of them, and itself 2**24 with IPv4."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, 64), strict=False))
        found = found.ipv4_mapped
    return _LOOPBACK if found.is_loopback else str(found)


def welcome(connection: HTTPConnection) -> None:
    """Count this request's connection as no stranger's until it is answered, since its secret was accepted."""
    if (release := connection.scope.get("state", {}).get(_WELCOME)) is not None:
        release()


class GuardedProtocol(H11Protocol):
    """One connection of uvicorn's; overrides internals of it, which ``tests/unit/fleet/net/test_connection_limits.py``
    watches.
    """

    def __init__(self, *args: Any, limits: StrangerLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self.app_state = {**self.app_state, _WELCOME: lambda: limits.release(self.transport)}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Count a new connection."""
        super().connection_made(transport)
        self._meet()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._limits.release(self.transport)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what the client said: a stranger's next request may not come before it has read the last answer."""
        before, is_unread = self.cycle, self.transport.get_write_buffer_size() > 0
        super().handle_events()
        if self.transport not in self._limits:
            return
        is_next = self.cycle is not before
        is_early = self.conn.their_state is h11.DONE and bool(self.conn.trailing_data[0])
        if is_early or (is_next and before is not None and is_unread):
            self.transport.abort()
        elif is_next:
            self._meet()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Its answer is whether the connection is accepted."""
        if self.transport in self._limits:
            self._meet()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """It may want something else."""
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._meet()

    def _meet(self) -> None:
        self._limits.admit(self.transport)


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """A connection that ``GuardedProtocol`` has handed over."""

    def __init__(self, *args: Any, limits: StrangerLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._limits.release(self.transport)
        super().connection_lost(exc)


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
