"""A far line gets the congestion control that bears losses, and a near one keeps the system's."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from varuna.process.far_lines import suit_far_line

_KNOWN = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
pytestmark = pytest.mark.skipif(
    not _KNOWN.exists() or not {"bbr", "reno"}.issubset(_KNOWN.read_text().split()), reason="this kernel has no BBR"
)


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
        listener.accept()[0],
    ):
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        yield caller


def control_of(connected: socket.socket) -> bytes:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("far_s", "expected"), [(1e-6, b"bbr"), (100.0, b"reno")])
def test_a_far_line_bears_losses_and_a_near_one_stays_as_it_is(
    connected: socket.socket, far_s: float, expected: bytes
) -> None:
    suit_far_line(connected, far_s)
    assert control_of(connected) == expected


def test_what_is_no_tcp_stays_as_it_is() -> None:
    near, far = socket.socketpair()
    with near, far:
        suit_far_line(near)
