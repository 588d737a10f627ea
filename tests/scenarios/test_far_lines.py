"""Connections over a line of 40 ms use the congestion control that bears losses."""

import socket
from pathlib import Path

import pytest

from tests.scenarios.nat import Host, Hosts, why_not
from varuna.engine.base.connection import Connection
from varuna.fleet.agent.port_server import JoinedLines

KNOWN = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
HERE = "10.80.0.1"
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(not KNOWN.exists() or "bbr" not in KNOWN.read_text(), reason="this kernel has no BBR"),
]


def _call() -> socket.socket:
    return socket.create_connection((HERE, 5000), 10)


def _usual(connected: socket.socket) -> socket.socket:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return connected


def _control_of(connected: socket.socket) -> bytes:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_both_ends_of_a_connection_and_a_relay_bear_losses_of_a_far_line() -> None:
    hosts = Hosts({"here": Host(HERE), "there": Host("10.80.0.2")}, delay_s=0.02)
    try:
        with hosts.inside("here", lambda: socket.create_server((HERE, 5000))) as listener:
            lines = [(_usual(hosts.inside("there", _call)), _usual(listener.accept()[0])) for _ in range(3)]
        (near, far), (one, joined), (other, with_it) = lines
        relay, ends = JoinedLines(lambda text: None), [Connection(near, "far"), Connection(far, "near")]
        relay.join_connections(joined, with_it)
        assert [_control_of(each) for each in (near, far, joined, with_it)] == [b"bbr"] * 4
        for end in ends:
            end.end()
        relay.close()
        one.close()
        other.close()
    finally:
        hosts.close()
