"""Members of a group meet, whoever else calls, and say who did not come."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from varuna.engine.base.connection import Unreachable
from varuna.engine.base.meeting import meet
from varuna.engine.base.transport import local_store
from varuna.testing.threads import run_all


def met(size: int, *, store: Any = None, bound_s: float = 20.0, ranks: range | None = None) -> dict[int, Any]:
    """Let members meet; each one's sockets, or its error."""
    store, found = store or local_store(), dict[int, Any]()

    def work(rank: int) -> None:
        try:
            found[rank] = meet(store, rank, size, "127.0.0.1", bound_s)
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
        import json

        host, port, _ = json.loads(self.get(str(rank)))
        return host, port


STRANGERS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 16 + b"\x01\x00\x00\x00", b"half")
"""what they say"""


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
            store.set("2", '["127.0.0.1", 9, "word"]')

    store = local_store()
    take_part(2, store)
    found = met(3, store=store, bound_s=0.5, ranks=range(2))
    assert "did not come within the bound: rank 2 of the group" in str(found[0])
    assert "did not come within the bound: rank 2 of the group" in str(found[1])


def test_a_member_that_is_gone_again_is_named_with_its_place() -> None:
    store = local_store()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host, port = gone.getsockname()
    store.set("0", f'["{host}", {port}, "word"]')
    found = met(2, store=store, ranks=range(1, 2))
    assert str(found[1]) == f"rank 0 of the group at 127.0.0.1:{port}: Connection refused"


def test_an_interface_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"cannot listen at 192\.0\.2\.1: "):
        meet(local_store(), 0, 2, "192.0.2.1", 5.0)


def test_nobody_waits_behind_a_member_that_nothing_gets_through_to() -> None:
    """Of three, rank 0 is a hole: the others say so of it, and not of each other."""
    store = local_store()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hole:
        host, port = hole.getsockname()
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:  # its queue is full: what comes later is dropped
            filler.setblocking(False)
            filler.connect_ex((host, port))
        store.set("0", f'["{host}", {port}, "word"]')
        found = met(3, store=store, bound_s=1.0, ranks=range(1, 3))
        for filler in fillers:
            filler.close()
    for rank in (1, 2):
        assert isinstance(found[rank], Unreachable)
        assert (found[rank].peer, str(found[rank])) == (
            0,
            f"rank 0 of the group at {host}:{port}: Connection timed out",
        )
