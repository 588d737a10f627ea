"""Connections of workers that cannot reach each other, joined in pairs: what comes in at one goes out at the other."""

import contextlib
import socket
import threading
from collections.abc import Callable

from varuna.process.far_lines import suit_far_line

_AT_ONCE_BYTES = 2**18
_SILENT_S = 30
"""An end that has taken nothing for so long is gone; also seconds without a sign of life of an idle one."""
_MOST = 512


class JoinedLines:
    """Each pair has two threads, one for each direction; only ``join`` and ``close`` are called from outside."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._told: set[tuple[str, str]] = set()

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Let two connections be one, until either ends."""
        pair = (one, other)
        try:
            hosts = sorted(_far_end(each) for each in pair)
            for each in pair:
                _watch(each)
        except OSError:  # one is gone already
            hosts = []
        with self._lock:
            if not hosts or len(self._pairs) >= _MOST:
                for each in pair:
                    each.close()
                return
            self._pairs.add(pair)
            is_news = (hosts[0], hosts[1]) not in self._told
            self._told.add((hosts[0], hosts[1]))
        if is_news:
            self._tell(f"relaying between workers at {hosts[0]} and {hosts[1]}, which cannot reach each other")
        threading.Thread(target=self._carry, args=(pair,), name="varuna-relay", daemon=True).start()

    def close(self) -> None:
        """End all pairs."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _hang_up(pair)

    def _carry(self, pair: tuple[socket.socket, socket.socket]) -> None:
        back = threading.Thread(target=_pump, args=pair[::-1], name="varuna-relay-back", daemon=True)
        back.start()
        _pump(*pair)
        back.join()
        with self._lock:
            self._pairs.discard(pair)
        for each in pair:
            each.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass on bytes until there are no more, and the end; a connection that breaks ends both."""
    room = memoryview(bytearray(_AT_ONCE_BYTES))
    try:
        while count := source.recv_into(room):
            sink.sendall(room[:count])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        _hang_up((source, sink))


def _hang_up(pair: tuple[socket.socket, socket.socket]) -> None:
    for each in pair:
        with contextlib.suppress(OSError):  # it has ended
            each.shutdown(socket.SHUT_RDWR)


def _far_end(connected: socket.socket) -> str:
    host: str = connected.getpeername()[0]
    return host.removeprefix("::ffff:")


def _watch(connected: socket.socket) -> None:
    """Block, and find within a bound that the other end is gone."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    suit_far_line(connected)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", 1000 * _SILENT_S)):
        if hasattr(socket, name):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
