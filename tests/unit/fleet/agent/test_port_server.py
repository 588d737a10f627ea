"""The one port of a machine: who says no word that somebody waits for is cut off, and two that say a pair are one."""

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import wait_for
from varuna.core.errors import FleetError
from varuna.fleet.agent.port_server import PortServer
from varuna.process.machine_port import Address, PortError, Waiting

WORD, OTHER = "0123456789abcdef", "f" * 16
PAIR = b"p" * 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def server(told: list[str]) -> Iterator[PortServer]:
    server = PortServer(free_port(), Address("203.0.113.7", 40123), told.append)
    server.start()
    yield server
    server.stop()


def call(server: PortServer, says: bytes) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", server.port), 20)
    caller.sendall(says)
    return caller


def read(connected: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (more := connected.recv(count - len(found))):
        found += more
    return found


def taken(waiting: Waiting) -> socket.socket:
    found: list[socket.socket] = []

    def take() -> bool:
        try:
            found.append(waiting.accept())
        except BlockingIOError:
            return False
        return True

    wait_for(take, 20)
    found[0].setblocking(True)
    return found[0]


def test_a_connection_is_handed_over_with_all_that_follows_its_word(server: PortServer) -> None:
    waiting, other = Waiting(server.path, WORD), Waiting(server.path, OTHER)
    assert waiting.facts == ((Address("203.0.113.7", 40123)), server.port)
    with call(server, WORD.encode() + b"more") as caller, taken(waiting) as connected:
        assert read(connected, 4) == b"more"
        connected.sendall(b"back")
        assert read(caller, 4) == b"back"
        assert not connected.get_inheritable()
        with pytest.raises(BlockingIOError):
            other.accept()
        waiting.close()
        server.stop()  # it has nothing to do with what was handed over
        caller.sendall(b"then")
        assert read(connected, 4) == b"then"
    other.close()


@pytest.mark.parametrize("says", [OTHER.encode(), b"GET / HTTP/1.1\r\n\r\n", WORD.encode() + PAIR])
def test_a_caller_whose_word_nobody_waits_for_is_cut_off(server: PortServer, says: bytes) -> None:
    Waiting(server.path, WORD).close()
    with call(server, says) as caller, suppress(ConnectionResetError):  # what it said was not read to its end
        assert caller.recv(1) == b""


def test_a_word_that_one_worker_has_is_not_given_to_another(server: PortServer) -> None:
    first = Waiting(server.path, WORD)
    with pytest.raises(PortError, match=r"does not answer at"):
        Waiting(server.path, WORD)
    with call(server, WORD.encode()), taken(first):
        pass
    first.close()


def test_a_worker_hears_that_its_agent_has_ended(server: PortServer) -> None:
    waiting = Waiting(server.path, WORD)
    server.stop()
    with pytest.raises(PortError, match="has ended"):
        waiting.accept()
    waiting.close()


def test_two_callers_of_a_pair_are_one_connection_until_either_ends(server: PortServer, told: list[str]) -> None:
    begins = server.relay.word.encode() + PAIR
    sent = bytes(range(256)) * 2**13
    with call(server, begins + b"before") as one, call(server, begins) as other:
        assert read(other, 6) == b"before"
        sender = threading.Thread(target=one.sendall, args=(sent,))
        sender.start()
        assert read(other, len(sent)) == sent
        sender.join()
        one.shutdown(socket.SHUT_WR)
        assert other.recv(1) == b""
        other.sendall(b"the other way is open")
        assert read(one, 21) == b"the other way is open"
        other.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b""
    assert told == ["relaying between workers at 127.0.0.1 and 127.0.0.1, which cannot reach each other"]


def test_the_end_of_the_server_ends_what_it_relays(server: PortServer) -> None:
    begins = server.relay.word.encode() + PAIR
    with call(server, begins) as one, call(server, begins) as other:
        one.sendall(b"+")
        assert other.recv(1) == b"+"
        server.stop()
        assert one.recv(1) == other.recv(1) == b""


def test_strangers_take_nobodys_place(server: PortServer) -> None:
    waiting = Waiting(server.path, WORD)
    strangers = [call(server, b"half") for _ in range(600)]
    with call(server, WORD.encode()), taken(waiting):
        pass
    waiting.close()
    for each in strangers:
        each.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FleetError, match=rf"cannot listen at --port {port}: .*Choose a free port"):
            PortServer(port, Address("h", port), print)


@pytest.mark.parametrize("place", ["nowhere", "long" * 40])
def test_a_folder_that_takes_no_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place != "nowhere":
        (tmp_path / place).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / place))
    port = free_port()
    with pytest.raises(FleetError, match=rf"cannot make a socket in .*{place} .*Set TMPDIR to another folder"):
        PortServer(port, Address("h", port), print)
    socket.create_server(("127.0.0.1", port)).close()  # it has given the port back
