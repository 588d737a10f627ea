"""The user at the other end of a connection, asked of the kernel."""

import os
import socket

import pytest

from varuna.fleet.net.connection_limits import user_of


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="only Linux says")
def test_the_user_at_the_other_end_is_known_until_it_closes_its_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, peer = server.accept()
        with accepted:
            assert user_of(peer, accepted.getsockname()) == os.getuid()
            client.close()
            assert user_of(peer, accepted.getsockname()) is None


@pytest.mark.parametrize("peer", [("127.0.0.1", 1), ("192.0.2.1", 80), ("2001:db8::1", 80), ("", 0)])
def test_of_an_end_that_is_not_here_nobody_is_the_user(peer: tuple[str, int]) -> None:
    assert user_of(peer, ("127.0.0.1", 2)) is None
