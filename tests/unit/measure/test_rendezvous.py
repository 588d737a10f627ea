"""The rendezvous store starts in the background, and whoever waits for it is told why it does not come."""

import socket
import threading

import pytest

from varuna.core.errors import FleetError
from varuna.measure import rendezvous
from varuna.measure.rendezvous import StoreHost


def test_its_address_is_where_it_listens() -> None:
    host = StoreHost()
    with socket.create_connection(host.address(), timeout=5):
        pass


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(FleetError, match=r"cannot start on 203\.0\.113\.9: .*an address of this machine"):
        StoreHost("203.0.113.9").address()


def test_a_start_that_hangs_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def hang(host: str, port: int) -> socket.socket:
        go.wait(10)
        raise OSError("the test is over")

    monkeypatch.setattr(rendezvous, "bind", hang)
    with pytest.raises(FleetError, match="did not start within 0 s"):
        StoreHost(start_s=0.05).address()
    go.set()
