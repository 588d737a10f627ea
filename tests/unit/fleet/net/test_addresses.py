"""Addresses of this machine."""

import socket

import pytest

from varuna.fleet.net import addresses
from varuna.fleet.net.addresses import address_towards, own_address


def test_an_address_is_one_of_this_machine_and_leads_where_it_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no such host.invalid") == ""
    assert own_address("10.1.2.3") == "10.1.2.3"
    own = own_address("0.0.0.0")
    with socket.create_server((own, 0)) as server:
        assert server.getsockname()[0] == socket.gethostbyname(own)
    monkeypatch.setattr(addresses, "address_towards", lambda host: "")  # no way out
    first = own_address("0.0.0.0")
    assert first
    assert not first.startswith("127.")
