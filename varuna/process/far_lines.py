"""Far lines, such as between homes: the usual congestion control (CUBIC) takes each lost packet for a full line."""

import socket
import sys
from contextlib import suppress

FAR_S = 0.01
"""There and back; machines of one region are nearer."""
_ROUND_TRIP = slice(68, 72)
"""In Linux's ``tcp_info``: microseconds."""


def suit_far_line(connected: socket.socket, far_s: float = FAR_S) -> None:
    """Send at the rate that was measured to arrive (BBR), if the line is far and this system has that."""
    if not hasattr(socket, "TCP_CONGESTION"):  # no Linux
        return
    with suppress(OSError):  # no BBR, or no TCP
        found = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.stop)
        if int.from_bytes(found[_ROUND_TRIP], sys.byteorder) >= 1e6 * far_s:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
