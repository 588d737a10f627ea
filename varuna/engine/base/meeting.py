"""Members of a group find each other by a store and connect, each with each.

Each member waits for calls, says where in the store, and looks where the others are. Then the later of two calls the
earlier. If that has not led to anything after a moment, since a firewall or an address translation (NAT) is between
them, the earlier calls the later, and then both call relays, which join their connections (``Way``). Of all
connections of two members the earlier takes one: the first that is of use::

    caller                        listener
    word, rank of the caller ->
                              <-  HERE
    HERE                      ->                       only if the caller is the earlier: it takes this one

A caller that does not say the word of the listener, which is in the store too, is none of the members: no member waits
for it. Whether a member is what it says is proven later (``links.authentication``).
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from varuna.engine.base.connection import UNREACHED, Unreachable
from varuna.engine.base.endpoint import Endpoint, Listener, Place, Way
from varuna.process.machine_port import WORD_BYTES, Address
from varuna.process.threads import start

OTHER_WAYS_S = 10.0
"""Seconds that a member waits for the other one's call, once its own has failed and nothing else is under way."""
_GREETING = struct.Struct(f"<{WORD_BYTES}sI")
"""the listener's word, the caller's rank"""
_HERE = b"+"
_LOOK_S, _NAME_S = 1.0, 0.05
_STRANGERS = 64
"""Callers that have not said anything yet, beyond those that are expected."""


class Met(NamedTuple):
    """A connected, blocking socket to another member, and how it came about."""

    connected: socket.socket
    way: Way


def meet(store: Any, rank: int, size: int, endpoint: Endpoint, bound_s: float) -> dict[int, Met]:
    """Connect with all other members; blocks until they do the same.

    Args:
        store: this group's own part of a store that all members reach.
        rank: this member.
        size: number of members.
        endpoint: where to wait for calls.
        bound_s: for all of it.

    Returns:
        By rank: the connection to each other member.

    Raises:
        RuntimeError: a member did not come within the bound; ``Unreachable`` if it has said where it is.
    """
    deadline_s = time.monotonic() + bound_s
    others = [other for other in range(size) if other != rank]
    if not others:
        return {}
    with contextlib.closing(endpoint.listen(secrets.token_hex(WORD_BYTES // 2), size + _STRANGERS)) as listener:
        store.set(str(rank), json.dumps(listener.place))
        store.wait([str(other) for other in others], timedelta(seconds=bound_s))
        places = {other: _place(store.get(str(other))) for other in others}
        with contextlib.closing(_Meeting(rank, listener, places, endpoint)) as meeting:
            return meeting.run(deadline_s)


def _place(text: bytes) -> Place:
    at, within, machine, word = json.loads(text)
    return Place(tuple(Address(*each) for each in at), Address(*within), machine, word)


@dataclass(eq=False)
class _Call:
    """A connection that may become the one with a member; ``then`` continues with it when something has come."""

    connected: socket.socket
    then: Callable[["_Call"], None]
    other: int = -1
    """-1: the caller has not said who it is"""
    way: Way = Way.CALLED
    to: Address | None = None
    """that is being called, until it has answered"""
    says: bytes = b""
    """once it is connected"""
    awaited_bytes: int = len(_HERE)
    heard: bytes = b""


class _Names:
    """Addresses of hosts. Names are looked up on other threads: a name server that is silent holds up no other call."""

    def __init__(self) -> None:
        self._found: dict[Address, tuple[int, Any] | OSError | None] = {}

    def look_up(self, to: Address) -> tuple[int, Any] | None:
        """Return the family and address of a socket; None: not yet.

        Raises:
            OSError: there is none.
        """
        if to not in self._found:
            try:
                self._found[to] = _socket_address(to, socket.AI_NUMERICHOST)
            except socket.gaierror:
                self._found[to] = None
                start("look-up", partial(self._ask, to))
        found = self._found[to]
        if isinstance(found, OSError):
            raise found
        return found

    def _ask(self, to: Address) -> None:
        try:
            self._found[to] = _socket_address(to)
        except OSError as error:
            self._found[to] = error


def _socket_address(to: Address, flags: int = 0) -> tuple[int, Any]:
    try:
        family, *_, address = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM, flags=flags)[0]
    except UnicodeError as error:  # no name server would be asked
        raise OSError(errno.EINVAL, f"{to.host!r} is no name of a machine: {error}") from error
    return family, address


class _Meeting:
    """Connections that are being made, all at once: none waits behind a member that cannot be reached."""

    def __init__(self, rank: int, listener: Listener, places: Mapping[int, Place], endpoint: Endpoint) -> None:
        self._rank, self._listener, self._places, self._endpoint = rank, listener, places, endpoint
        self._awaited = set(places)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._met: dict[int, Met] = {}
        self._calls: dict[_Call, None] = {}  # in the order in which they began
        self._problems: dict[int, tuple[int, str, float]] = {}  # by member: why no call got through, and since when
        self._names = _Names()
        self._unnamed: list[tuple[Address, int, Way, bytes, bool]] = []  # calls to those

    def run(self, deadline_s: float) -> dict[int, Met]:
        """Call, and wait until all are there."""
        now_s = time.monotonic()
        due = sorted((now_s + after_s, way, other) for other in self._places for way, after_s in self._ways(other))
        while self._awaited:
            now_s = time.monotonic()
            while due and due[0][0] <= now_s:
                _, way, other = due.pop(0)
                if other in self._awaited:
                    self._begin(way, other)
            unnamed, self._unnamed = self._unnamed, []
            for call in unnamed:
                if call[1] in self._awaited:
                    self._call(*call)
            untried = {other for _, _, other in due}.union(call[1] for call in self._unnamed)
            self._despair(untried, deadline_s, now_s)
            soon_s = [now_s + _NAME_S] if self._unnamed else []
            until_s = min([deadline_s, *soon_s, *(each_s for each_s, _, _ in due[:1])])
            for key, _ in self._selector.select(min(_LOOK_S, max(0.0, until_s - now_s))):
                self._go_on(key.data)
        met, self._met = self._met, {}
        return met

    def close(self) -> None:
        """Close all that has not been handed over."""
        self._selector.close()
        for connected in (*(each.connected for each in self._met.values()), *(call.connected for call in self._calls)):
            connected.close()

    # -- calling ---------------------------------------------------------------------------------------------

    def _ways(self, other: int) -> list[tuple[Way, float]]:
        """Return the ways to try, each with its delay in seconds."""
        if self._is_within(other):
            return [(Way.CALLED, 0.0)]
        known = self._endpoint.ways.get(self._places[other].machine)
        return [(way, 0.0 if way == known else self._endpoint.next_way_s * way) for way in Way]

    def _is_within(self, other: int) -> bool:
        return self._places[other].machine == self._endpoint.machine

    def _begin(self, way: Way, other: int) -> None:
        # By rank, so both ends agree without a word on who calls, and on who takes a connection.
        early, late = min(self._rank, other), max(self._rank, other)
        place = self._places[other]
        if way == Way.RELAYED:
            word = self._places[early].word if early == other else self._listener.place.word
            greeting = _GREETING.pack(word.encode(), late)  # names the pair to the relay, too
            calls = late == self._rank
            for relay in self._endpoint.relays:
                says = relay.word.encode() + greeting + (greeting if calls else b"")
                self._call(Address(relay.host, relay.port), other, way, says, calls)
        elif (way == Way.CALLED) == (self._rank == late):
            greeting = _GREETING.pack(place.word.encode(), self._rank)
            for to in (place.within,) if self._is_within(other) else place.at:
                self._call(to, other, way, greeting, True)

    def _call(self, to: Address, other: int, way: Way, says: bytes, calls: bool) -> None:
        """Begin to call, once it is known where; without ``calls``, the other end speaks first, joined by a relay."""
        try:
            if (found := self._names.look_up(to)) is None:
                self._unnamed.append((to, other, way, says, calls))
                return
            family, address = found
            connected = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._note(other, way, to, error.errno or 0, error.strerror or str(error))
            return
        connected.setblocking(False)
        call = _Call(connected, self._answered if calls else self._greeted, other, way, to, says)
        if not calls:
            call.awaited_bytes = _GREETING.size
        self._calls[call] = None
        if (number := connected.connect_ex(address)) not in (0, errno.EINPROGRESS):
            self._end(call, number)
            return
        self._selector.register(connected, selectors.EVENT_WRITE, call)

    def _connected(self, call: _Call) -> None:
        number = call.connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not number:
            try:
                call.connected.send(call.says)  # the buffer is empty: it takes all
            except OSError as error:
                number = error.errno or errno.EPIPE
        if number:
            self._end(call, number)
            return
        call.says = b""
        self._selector.modify(call.connected, selectors.EVENT_READ, call)

    def _answered(self, call: _Call) -> None:
        """Continue with a call that was answered: the member is there."""
        if call.other > self._rank and not self._say(call):  # this end takes the connection
            return
        self._came(call)

    # -- called ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            caller, heard = self._listener.accept()
        except OSError:  # it is gone again
            return
        caller.setblocking(False)
        strangers = [call for call in self._calls if call.other < 0]
        if len(strangers) >= len(self._awaited) + _STRANGERS:  # the oldest has had the longest time to speak
            self._drop(strangers[0]).close()
        call = _Call(caller, self._greeted, awaited_bytes=_GREETING.size, heard=heard)
        self._calls[call] = None
        self._selector.register(caller, selectors.EVENT_READ, call)

    def _greeted(self, call: _Call) -> None:
        """Continue with a caller that has said the word, and its rank."""
        word, other = _GREETING.unpack(call.heard)
        if other not in self._awaited or not secrets.compare_digest(word, self._listener.place.word.encode()):
            self._drop(call).close()
            return
        if call.other < 0:
            call.way = Way.CALLED if other > self._rank else Way.CALLED_BACK
        call.other, call.heard, call.awaited_bytes = other, b"", len(_HERE)
        if not self._say(call):
            return
        if other > self._rank:
            self._came(call)
        else:
            call.then = self._came  # once the caller, which is the earlier, takes this one

    # -- both ------------------------------------------------------------------------------------------------

    def _go_on(self, call: _Call | None) -> None:
        """Continue where something has happened on a connection, or with a new call."""
        if call is None:
            self._accept()
        elif call not in self._calls:  # dropped by what came at the same time
            return
        elif call.says:
            self._connected(call)
        else:
            self._hear(call)

    def _hear(self, call: _Call) -> None:
        try:
            more = call.connected.recv(call.awaited_bytes - len(call.heard))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(call, error.errno or errno.EPIPE)
            return
        call.heard += more
        if not more:
            self._end(call, 0)
        elif len(call.heard) == call.awaited_bytes:
            call.then(call)

    def _say(self, call: _Call) -> bool:
        try:
            call.connected.send(_HERE)
        except OSError as error:
            self._end(call, error.errno or errno.EPIPE)
            return False
        return True

    def _came(self, call: _Call) -> None:
        """Take this connection with a member; drop all others."""
        self._drop(call).setblocking(True)
        self._met[call.other] = Met(call.connected, call.way)
        self._awaited.discard(call.other)
        self._endpoint.ways[self._places[call.other].machine] = call.way
        for other_call in [each for each in self._calls if each.other == call.other]:
            self._drop(other_call).close()

    def _drop(self, call: _Call) -> socket.socket:
        self._selector.unregister(call.connected)
        del self._calls[call]
        return call.connected

    def _end(self, call: _Call, number: int) -> None:
        """Drop a connection that has failed; ``number`` is 0 if the other end has closed it."""
        with contextlib.suppress(KeyError):  # it has not begun
            self._selector.unregister(call.connected)
        del self._calls[call]
        call.connected.close()
        if call.to is not None:
            self._note(
                call.other, call.way, call.to, number, os.strerror(number) if number else "closed the connection"
            )

    def _note(self, other: int, way: Way, to: Address, number: int, why: str) -> None:
        """Note why nothing got through; the first reason counts."""
        at = f"the relay at {to}, for rank {other} of the group" if way == Way.RELAYED else _at(other, to)
        self._problems.setdefault(other, (number, f"{at}: {why}", time.monotonic()))

    def _despair(self, untried: Iterable[int], deadline_s: float, now_s: float) -> None:
        """Give up on members that nothing will lead to any more."""
        is_late = now_s >= deadline_s
        if not is_late and not self._problems:
            return
        if is_late:
            for call in self._calls:
                if call.to is not None and call.says:
                    self._note(call.other, call.way, call.to, errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            for to, other, way, *_ in self._unnamed:
                self._note(other, way, to, errno.ETIMEDOUT, "no name server has answered")
        under_way = {call.other for call in self._calls}.union(untried)
        for other in sorted(self._awaited.intersection(self._problems)):
            number, text, since_s = self._problems[other]
            is_over = other not in under_way and (self._is_within(other) or now_s >= since_s + OTHER_WAYS_S)
            # Before the bound, of an earlier member only: a later one may still call this one.
            if is_late or (is_over and other < self._rank):
                raise Unreachable(text, other) if number in UNREACHED else RuntimeError(text)
        if is_late:
            missing = sorted(self._awaited)
            raise Unreachable(f"did not come within the bound: {_ranks(missing)} of the group", missing[0])


def _at(other: int, to: Address) -> str:
    return f"rank {other} of the group at {to}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
