"""Endpoints, at which other members of a group reach this process: addresses of its own, or its machine's one port."""

import socket
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from varuna.core.messages import Relay
from varuna.process.machine_port import Address, Waiting, network_stack


class Way(IntEnum):
    """A way in which two members come to their connection; each is tried a little after those before it."""

    CALLED = 0
    """the later one in the group calls the earlier"""
    CALLED_BACK = 1
    """the earlier one calls"""
    RELAYED = 2
    """both call a relay, which joins their connections"""


class Place(NamedTuple):
    """Addresses at which a member can be called, as it tells the others."""

    at: tuple[Address, ...]
    """from other machines"""
    within: Address
    """from its own"""
    machine: str
    word: str
    """that a call for it begins with"""


@dataclass(frozen=True)
class Endpoint:
    """The address at which this process waits for calls, and the relays that may join its connections."""

    host: str
    """an address of this machine"""
    machine_port: str = ""
    """the agent's socket, if calls come in at the machine's port; empty: at a free one of this process"""
    relays: tuple[Relay, ...] = ()
    machine: str = field(default_factory=network_stack)
    next_way_s: float = 1.0
    """seconds after which another way is tried, too"""
    ways: dict[str, Way] = field(default_factory=dict)
    """by machine: the way that led to it most recently, which is tried at once"""

    def listen(self, word: str, backlog: int) -> "Listener":
        """Wait for calls.

        Raises:
            RuntimeError: that is not possible here.
        """
        if self.machine_port:
            return _AtMachinePort(self, word)
        return _AtFreePort(self, word, backlog)


class Listener(Protocol):
    """Waits for calls."""

    place: Place

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when a member calls."""
        ...

    def accept(self) -> tuple[socket.socket, bytes]:
        """Take a call, and what has been read of it.

        Raises:
            OSError: it is gone again.
        """
        ...

    def close(self) -> None:
        """Wait no longer."""
        ...


class _AtFreePort:
    def __init__(self, endpoint: Endpoint, word: str, backlog: int) -> None:
        try:
            family, *_, address = socket.getaddrinfo(endpoint.host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(address, family=family, backlog=backlog)
        except OSError as error:
            raise RuntimeError(f"cannot listen at {endpoint.host}: {error.strerror or error}") from error
        self._socket.setblocking(False)
        here = Address(*self._socket.getsockname()[:2])
        self.place = Place((here,), here, endpoint.machine, word)
        self.fileno, self.close = self._socket.fileno, self._socket.close

    def accept(self) -> tuple[socket.socket, bytes]:
        return self._socket.accept()[0], b""


class _AtMachinePort:
    def __init__(self, endpoint: Endpoint, word: str) -> None:
        self._waiting, self._word = Waiting(endpoint.machine_port, word), word.encode()
        facts = self._waiting.facts
        near = Address(endpoint.host, facts.port)  # for those on the same private network
        self.place = Place(
            tuple(dict.fromkeys((facts.announced, near))), Address("127.0.0.1", facts.port), endpoint.machine, word
        )
        self.fileno, self.close = self._waiting.fileno, self._waiting.close

    def accept(self) -> tuple[socket.socket, bytes]:
        return self._waiting.accept(), self._word
