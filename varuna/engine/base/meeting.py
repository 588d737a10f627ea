"""Members of a group find each other by a store and connect, each with each.

Each member listens, says where in the store, and waits until all have said so. Then it dials those before it and lets
in those after it, who name themselves. A caller that does not say the word of the listener, which is in the store too,
is none of them: it keeps nobody waiting.
"""

import contextlib
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

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
        RuntimeError: a member did not come within the bound.
    """
    deadline_s = time.monotonic() + bound_s
    others = [other for other in range(size) if other != rank]
    if not others:
        return {}
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(_close, found)
        with _listener(interface_host, size) as listener:
            word = secrets.token_hex(_WORD_BYTES // 2)
            store.set(str(rank), json.dumps([*listener.getsockname()[:2], word]))
            store.wait([str(other) for other in others], timedelta(seconds=bound_s))
            for other in others:
                if other < rank:
                    place = _Place(*json.loads(store.get(str(other))))
                    found[other] = _dial(other, place, rank, deadline_s)
            _let_in(listener, word, set(range(rank + 1, size)), found, deadline_s)
        on_failure.pop_all()
    return found


def _listener(host: str, size: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=size + _STRANGERS)
    except OSError as error:
        raise RuntimeError(f"cannot listen at {host}: {error.strerror or error}") from error


def _dial(other: int, place: _Place, rank: int, deadline_s: float) -> socket.socket:
    left_s = max(0.001, deadline_s - time.monotonic())
    try:
        connected = socket.create_connection((place.host, place.port), left_s)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise RuntimeError(f"rank {other} of the group at {place.host}:{place.port}: {reason}") from error
    try:
        connected.sendall(_GREETING.pack(place.word.encode(), rank))
        connected.settimeout(None)
    except OSError as error:
        connected.close()
        raise RuntimeError(f"rank {other} of the group at {place.host}:{place.port}: {error}") from error
    return connected


def _let_in(
    listener: socket.socket, word: str, awaited: set[int], found: dict[int, socket.socket], deadline_s: float
) -> None:
    """Accept until all who are awaited have greeted."""
    greetings: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while awaited:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RuntimeError(f"did not come within the bound: {_ranks(sorted(awaited))} of the group")
                for key, _ in selector.select(left_s):
                    if key.fileobj is listener:
                        _accept(listener, selector, greetings, len(awaited) + _STRANGERS)
                        continue
                    caller = key.fileobj
                    assert isinstance(caller, socket.socket)
                    said = _hear(caller, greetings.get(caller, b""))
                    if said is not None and len(said) < _GREETING.size:
                        greetings[caller] = said
                        continue
                    selector.unregister(caller)
                    del greetings[caller]
                    theirs, other = _GREETING.unpack(said) if said else (b"", -1)
                    if other in awaited and secrets.compare_digest(theirs, word.encode()):
                        awaited.discard(other)
                        caller.setblocking(True)
                        found[other] = caller
                    else:
                        caller.close()
        finally:
            for caller in greetings:
                caller.close()


def _accept(
    listener: socket.socket, selector: selectors.BaseSelector, greetings: dict[socket.socket, bytes], most: int
) -> None:
    try:
        caller, _ = listener.accept()
    except OSError:  # it is gone again
        return
    caller.setblocking(False)
    if len(greetings) >= most:  # the oldest has had the longest time to speak
        oldest = next(iter(greetings))
        selector.unregister(oldest)
        del greetings[oldest]
        oldest.close()
    greetings[caller] = b""
    selector.register(caller, selectors.EVENT_READ)


def _hear(caller: socket.socket, said: bytes) -> bytes | None:
    """What it has said by now; None if it is gone."""
    try:
        more = caller.recv(_GREETING.size - len(said))
    except BlockingIOError:
        return said
    except OSError:
        return None
    return said + more if more else None


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _close(found: dict[int, socket.socket]) -> None:
    for connected in found.values():
        connected.close()
