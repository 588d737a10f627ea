"""Members of a group find each other by a store and connect, each with each.

Each member listens, says where in the store, and waits until all have said so. Then it dials those before it and lets
in those after it, who name themselves. A caller that does not say the word of the listener, which is in the store too,
is none of them: it keeps nobody waiting.
"""

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

from varuna.engine.base.connection import UNREACHED, Unreachable

_WORD_BYTES = 16
_GREETING = struct.Struct(f"<{_WORD_BYTES}sI")
"""the listener's word, the caller's rank"""
_STRANGERS = 64
"""Callers that have not said anything yet, beyond those that are expected."""


class _Place(NamedTuple):
    """Where a member listens."""

    host: str
    port: int
    word: str


def meet(store: Any, rank: int, size: int, interface_host: str, bound_s: float) -> dict[int, socket.socket]:
    """Connect with all other members; blocks until they do the same.

    Args:
        store: this group's own part of a store that all members reach.
        rank: this member.
        size: number of members.
        interface_host: address to listen at.
        bound_s: for all of it.

    Returns:
        A connected, blocking socket for each other rank.

    Raises:
        RuntimeError: a member did not come within the bound; ``Unreachable`` if it has said where it is.
    """
    deadline_s = time.monotonic() + bound_s
    others = [other for other in range(size) if other != rank]
    if not others:
        return {}
    with contextlib.closing(_Meeting(rank, others)) as meeting, _listener(interface_host, size) as listener:
        word = secrets.token_hex(_WORD_BYTES // 2)
        store.set(str(rank), json.dumps([*listener.getsockname()[:2], word]))
        store.wait([str(other) for other in others], timedelta(seconds=bound_s))
        for other in others:
            if other < rank:
                meeting.dial(other, _Place(*json.loads(store.get(str(other)))))
        meeting.let_in(listener, word)
        return meeting.end(deadline_s)


def _listener(host: str, size: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=size + _STRANGERS)
    except OSError as error:
        raise RuntimeError(f"cannot listen at {host}: {error.strerror or error}") from error


class _Meeting:
    """Connections that are being made, all at once: nobody waits behind one who cannot be reached."""

    def __init__(self, rank: int, others: Sequence[int]) -> None:
        self._rank, self._awaited = rank, set(others)
        self._selector = selectors.DefaultSelector()
        self._found: dict[int, socket.socket] = {}
        self._dialled: dict[socket.socket, tuple[int, _Place]] = {}
        self._greetings: dict[socket.socket, bytes] = {}
        self._word = b""

    def dial(self, other: int, place: _Place) -> None:
        """Begin to call a member."""
        try:
            family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
            connected = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise RuntimeError(f"{_at(other, place)}: {error.strerror or error}") from error
        connected.setblocking(False)
        self._dialled[connected] = other, place
        if (number := connected.connect_ex(address)) not in (0, errno.EINPROGRESS):
            self._failed(connected, number)
        self._selector.register(connected, selectors.EVENT_WRITE, self._answered)

    def let_in(self, listener: socket.socket, word: str) -> None:
        """Let in who says the word."""
        listener.setblocking(False)
        self._word = word.encode()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def end(self, deadline_s: float) -> dict[int, socket.socket]:
        """Wait until all are there."""
        while self._awaited:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                for connected in self._dialled:
                    self._failed(connected, errno.ETIMEDOUT)
                missing = sorted(self._awaited)
                raise Unreachable(f"did not come within the bound: {_ranks(missing)} of the group", missing[0])
            for key, _ in self._selector.select(left_s):
                key.data(key.fileobj)
        found, self._found = self._found, {}
        return found

    def close(self) -> None:
        """Close all that has not been handed over."""
        self._selector.close()
        for connected in (*self._found.values(), *self._dialled, *self._greetings):
            connected.close()

    def _answered(self, connected: socket.socket) -> None:
        other, place = self._dialled[connected]
        if number := connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(connected, number)
        try:
            connected.setblocking(True)
            connected.sendall(_GREETING.pack(place.word.encode(), self._rank))
        except OSError as error:
            self._failed(connected, error.errno or errno.EPIPE)
        self._selector.unregister(connected)
        del self._dialled[connected]
        self._came(other, connected)

    def _failed(self, connected: socket.socket, number: int) -> NoReturn:
        other, place = self._dialled[connected]
        text = f"{_at(other, place)}: {os.strerror(number)}"
        raise Unreachable(text, other) if number in UNREACHED else RuntimeError(text)

    def _came(self, other: int, connected: socket.socket) -> None:
        self._found[other] = connected
        self._awaited.discard(other)

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller, _ = listener.accept()
        except OSError:  # it is gone again
            return
        caller.setblocking(False)
        if len(self._greetings) >= len(self._awaited) + _STRANGERS:  # the oldest has had the longest time to speak
            self._drop(next(iter(self._greetings))).close()
        self._greetings[caller] = b""
        self._selector.register(caller, selectors.EVENT_READ, self._hear)

    def _hear(self, caller: socket.socket) -> None:
        if caller not in self._greetings:  # dropped by what came at the same time
            return
        try:
            more = caller.recv(_GREETING.size - len(self._greetings[caller]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said = self._greetings[caller] = self._greetings[caller] + more
        if more and len(said) < _GREETING.size:
            return
        self._drop(caller)
        theirs, other = _GREETING.unpack(said) if more else (b"", -1)
        if other in self._awaited and other > self._rank and secrets.compare_digest(theirs, self._word):
            caller.setblocking(True)
            self._came(other, caller)
        else:
            caller.close()

    def _drop(self, caller: socket.socket) -> socket.socket:
        self._selector.unregister(caller)
        del self._greetings[caller]
        return caller


def _at(other: int, place: _Place) -> str:
    return f"rank {other} of the group at {place.host}:{place.port}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
