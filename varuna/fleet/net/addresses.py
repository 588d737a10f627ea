"""The choice among a machine's own addresses; no packet is sent to find out."""

import fcntl
import socket
import struct
from contextlib import suppress

_ELSEWHERE = "192.0.2.1"
"""Kept for documentation: whatever leads there leads to most places."""
_PORT = 9
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR"""


def own_address(host: str) -> str:
    """``host``, unless that means all addresses: then the one by which this machine reaches others.

    On a network without a way out it is the address of the first interface, and its name where there is none.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    return address_towards(_ELSEWHERE) or _first_address() or socket.gethostname()


def address_towards(host: str) -> str:
    """This machine's address on the way to ``host``; empty if there is no way."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            address: str = probe.getsockname()[0]
    except OSError:
        return ""
    return address


def _first_address() -> str:
    """Return the first IPv4 address; a machine's own name would lead to its loopback on Debian."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                address = socket.inet_ntoa(found[20:24])
                if not address.startswith("127."):
                    return address
    return ""
