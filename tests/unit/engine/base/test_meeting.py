"""Members of a group meet, whoever else calls, and say who did not come."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from varuna.core.messages import Relay
from varuna.engine.base.connection import Unreachable
from varuna.engine.base.endpoint import Endpoint, Listener, Place, Way
from varuna.engine.base.meeting import meet
from varuna.engine.base.transport import local_store
from varuna.fleet.agent.port_server import PortServer
from varuna.process.machine_port import Address, network_stack
from varuna.testing.threads import run_all


def place(host: str, port: int) -> str:
    """Return the place that a member of this machine tells the others."""
    return json.dumps(Place((Address(host, port),), Address(host, port), network_stack(), "word"))


def met(size: int, *, store: Any = None, bound_s: float = 20.0, ranks: range | None = None) -> dict[int, Any]:
    """Let members meet; each one's sockets, or its error."""
    store, found = store or local_store(), dict[int, Any]()

    def work(rank: int) -> None:
        try:
            met = meet(store, rank, size, Endpoint("127.0.0.1"), bound_s)
            found[rank] = {other: each.connected for other, each in met.items()}
        except RuntimeError as error:
            found[rank] = error

    run_all([partial(work, rank) for rank in ranks or range(size)])
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 17])
def test_each_is_connected_with_each(size: int) -> None:
    found = met(size)
    for rank, sockets in found.items():
        assert sorted(sockets) == [other for other in range(size) if other != rank]
        for other, connected in sockets.items():
            assert connected.getpeername() == found[other][rank].getsockname()
            assert connected.gettimeout() is None
    for sockets in found.values():
        for connected in sockets.values():
            connected.close()


class Store:
    """A store beside which something happens once all addresses are in it."""

    def __init__(self, size: int, then: Callable[["Store"], None]) -> None:
        self.inner, self.size, self.then = local_store(), size, then
        self.once = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.inner.get(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.inner.wait([*keys], timeout)
        with self.once:
            then, self.then = self.then, lambda store: None
            then(self)

    def address(self, rank: int) -> tuple[str, int]:
        _, (host, port), *_ = json.loads(self.get(str(rank)))
        return host, port


STRANGERS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 16 + b"\x01\x00\x00\x00", b"half")
"""their words"""


def test_strangers_keep_nobody_waiting() -> None:
    callers: list[socket.socket] = []

    def call(store: Store) -> None:
        with contextlib.suppress(OSError):  # all have met
            for number in range(100):  # more than fit in the listener's queue
                callers.append(socket.create_connection(store.address(0)))
                callers[-1].sendall(STRANGERS[number % len(STRANGERS)])

    calls: list[threading.Thread] = []

    def begin_to_call(store: Store) -> None:
        calls.append(threading.Thread(target=call, args=(store,)))
        calls[0].start()
        time.sleep(0.1)

    begin_s = time.monotonic()
    found = met(3, store=Store(3, begin_to_call))
    calls[0].join(20)
    assert time.monotonic() - begin_s < 15
    assert [sorted(found[rank]) for rank in range(3)] == [[1, 2], [0, 2], [0, 1]]
    for each in [*callers, *(connected for sockets in found.values() for connected in sockets.values())]:
        each.close()


def test_a_member_that_does_not_come_to_the_store_is_named() -> None:
    found = met(3, bound_s=0.3, ranks=range(2))
    assert all(isinstance(found[rank], RuntimeError) for rank in range(2))


def test_a_member_that_says_where_it_is_and_does_not_dial_is_named() -> None:
    def take_part(rank: int, store: Any) -> None:
        if rank == 2:
            store.set("2", place("127.0.0.1", 9))

    store = local_store()
    take_part(2, store)
    found = met(3, store=store, bound_s=0.5, ranks=range(2))
    assert "did not come within the bound: rank 2 of the group" in str(found[0])
    assert "did not come within the bound: rank 2 of the group" in str(found[1])


def test_a_member_that_is_gone_again_is_named_with_its_place() -> None:
    store = local_store()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host, port = gone.getsockname()
    store.set("0", place(host, port))
    found = met(2, store=store, ranks=range(1, 2))
    assert str(found[1]) == f"rank 0 of the group at 127.0.0.1:{port}: Connection refused"


def test_an_interface_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"cannot listen at 192\.0\.2\.1: "):
        meet(local_store(), 0, 2, Endpoint("192.0.2.1"), 5.0)


def test_nobody_waits_behind_a_member_that_nothing_gets_through_to() -> None:
    """Of three, rank 0 is a hole: the others say so of it, and not of each other."""
    store = local_store()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hole:
        host, port = hole.getsockname()
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:  # its queue is full: what comes later is dropped
            filler.setblocking(False)
            filler.connect_ex((host, port))
        store.set("0", place(host, port))
        found = met(3, store=store, bound_s=1.0, ranks=range(1, 3))
        for filler in fillers:
            filler.close()
    for rank in (1, 2):
        assert isinstance(found[rank], Unreachable)
        assert (found[rank].peer, str(found[rank])) == (
            0,
            f"rank 0 of the group at {host}:{port}: Connection timed out",
        )


def test_nobody_waits_behind_a_name_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, rank 0 has a name of which nobody says anything; the name of rank 1 is found."""
    over, known = threading.Event(), socket.getaddrinfo

    def look_up(host: str, port: int, **named: Any) -> Any:
        if host == "silent.example" and not named.get("flags"):
            over.wait(10)
            raise socket.gaierror("nobody knows it")
        return known(host, port, **named)

    class Named(Endpoint):
        def listen(self, word: str, backlog: int) -> Listener:
            listener = super().listen(word, backlog)
            listener.place = listener.place._replace(at=(Address("localhost", listener.place.at[0].port),))
            return listener

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    store = local_store()
    store.set("0", place("silent.example", 1))
    found = dict[int, Any]()

    def work(rank: int) -> None:
        try:
            meet(store, rank, 3, Named("127.0.0.1", machine=str(rank)), 1.0)
        except Unreachable as error:
            found[rank] = error.peer, str(error)

    run_all([partial(work, rank) for rank in (1, 2)])
    over.set()
    text = "rank 0 of the group at silent.example:1: no name server has answered"
    assert found == {1: (0, text), 2: (0, text)}


def test_a_name_that_no_name_server_could_know_is_told_as_the_reason() -> None:
    store = local_store()
    store.set("0", place("a" * 64, 1))
    with pytest.raises(RuntimeError, match=r"rank 0 of the group at a+:1: 'a+' is no name of a machine"):
        meet(store, 1, 2, Endpoint("127.0.0.1", machine="other"), 0.5)


@contextlib.contextmanager
def relay(tell: Callable[[str], None] = lambda text: None) -> Iterator[PortServer]:
    """The port of a machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = PortServer(port, Address("127.0.0.1", port), tell)
    server.start()
    yield server
    server.stop()


class Hidden(Endpoint):
    """A member behind NAT: what it says of itself leads nowhere."""

    def listen(self, word: str, backlog: int) -> Listener:
        listener = super().listen(word, backlog)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            nowhere = Address(*gone.getsockname())
        listener.place = listener.place._replace(at=(nowhere,))
        return listener


def met_at(endpoints: list[Endpoint], bound_s: float = 20.0) -> dict[int, Any]:
    """Let members of several machines meet, and say a word to each other; by rank: the ways, or its error."""
    store, found = local_store(), dict[int, Any]()

    def work(rank: int) -> None:
        try:
            met = meet(store, rank, len(endpoints), endpoints[rank], bound_s)
        except RuntimeError as error:
            found[rank] = error
            return
        for each in met.values():
            each.connected.sendall(bytes([rank]))
        for other, each in met.items():
            assert each.connected.recv(1) == bytes([other])
            each.connected.close()
        found[rank] = {other: each.way for other, each in met.items()}

    run_all([partial(work, rank) for rank in range(len(endpoints))])
    return found


@pytest.mark.parametrize("hidden", [0, 1])
def test_of_two_members_the_one_that_can_be_reached_is_called(hidden: int) -> None:
    endpoints = [
        (Hidden if rank == hidden else Endpoint)("127.0.0.1", machine=str(rank), next_way_s=0.1) for rank in range(2)
    ]
    way = Way.CALLED if hidden == 1 else Way.CALLED_BACK
    assert met_at(endpoints) == {0: {1: way}, 1: {0: way}}
    assert endpoints[0].ways == {"1": way}


def test_the_way_that_led_to_a_machine_is_tried_first_the_next_time() -> None:
    endpoints = [kind("127.0.0.1", machine=str(rank), next_way_s=1e6) for rank, kind in enumerate((Hidden, Endpoint))]
    endpoints[0].ways["1"] = Way.CALLED_BACK
    assert met_at(endpoints) == {0: {1: Way.CALLED_BACK}, 1: {0: Way.CALLED_BACK}}


def test_members_that_cannot_reach_each_other_are_joined_by_a_relay() -> None:
    told: list[str] = []
    with relay(told.append) as server:
        gone = Relay(host="127.0.0.1", port=9, word="0" * 16)
        hidden = [
            Hidden("127.0.0.1", machine=str(rank), next_way_s=0.1, relays=(gone, server.relay)) for rank in range(2)
        ]
        endpoints = [*hidden, Endpoint("127.0.0.1", machine="2", next_way_s=0.1)]
        assert met_at(endpoints) == {
            0: {1: Way.RELAYED, 2: Way.CALLED_BACK},
            1: {0: Way.RELAYED, 2: Way.CALLED_BACK},
            2: {0: Way.CALLED_BACK, 1: Way.CALLED_BACK},
        }
    assert told == ["relaying between workers at 127.0.0.1 and 127.0.0.1, which cannot reach each other"]


def test_a_relay_that_does_not_know_the_word_joins_nobody_and_the_first_reason_is_said() -> None:
    with relay() as server:
        stranger = server.relay.model_copy(update={"word": "f" * 16})
        found = met_at(
            [Hidden("127.0.0.1", machine=str(rank), next_way_s=0.1, relays=(stranger,)) for rank in range(2)],
            bound_s=2.0,
        )
    for rank in range(2):
        assert isinstance(found[rank], Unreachable)
        assert found[rank].peer == 1 - rank
        assert f"rank {1 - rank} of the group at 127.0.0.1:" in str(found[rank])
        assert "Connection refused" in str(found[rank])


def test_workers_of_a_machine_with_one_port_are_called_at_it_from_everywhere() -> None:
    """By two of the same machine, by another machine, and among four groups at once."""
    with relay() as server:
        inside = [Endpoint("127.0.0.1", server.path, machine="0") for _ in range(2)]
        found: list[dict[int, Any]] = []
        outside = Hidden("127.0.0.1", machine="1")
        run_all([lambda: found.append(met_at([*inside, outside])) for _ in range(4)])
        assert [(each[0][1], each[0][2], each[1][2]) for each in found] == [(Way.CALLED,) * 3] * 4


def test_a_worker_whose_agent_is_gone_says_so() -> None:
    with relay() as server:
        endpoint = Endpoint("127.0.0.1", server.path)
    with pytest.raises(RuntimeError, match=r"the agent that started this worker does not answer at .*Its log says why"):
        meet(local_store(), 0, 2, endpoint, 5.0)
