"""The one port of this machine: connections for its workers are handed over, and those of a relay's guests joined.

Whoever calls says a word first. Words are secrets: a worker tells its own to the members of its generation, and the
relay's goes with assignments to those who may have to ask. A caller with another one, or none, is cut off.
"""

import contextlib
import json
import secrets
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from varuna.core.errors import FleetError
from varuna.core.messages import Relay
from varuna.fleet.net.serving import raise_open_files
from varuna.process.far_lines import suit_far_line
from varuna.process.machine_port import WORD_BYTES, Address, hand_over

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

    def join_connections(self, one: socket.socket, other: socket.socket) -> None:
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


_PAIR_BYTES = WORD_BYTES + 4
"""Bytes that name a pair to a relay: the word of one, and the rank of the other."""
_SPEAKS_S = 10.0
"""A caller says its word within this time."""
_JOINS_S = 40.0
"""The other one of a pair calls a relay within this time: longer than members of a generation look for each other."""
_TICK_S = 1.0
_MOST_CALLERS = 512
"""That have not said whom they are for, or wait for the other one of their pair."""


@dataclass(eq=False)
class _Caller:
    connected: socket.socket
    until_s: float
    heard: bytes = b""
    awaited_bytes: int = WORD_BYTES


class PortServer:
    """Serves in a thread of its own; ``stop`` may be called by any thread.

    Args:
        port: to listen at, at all addresses of this machine.
        announced: where machines elsewhere reach it.
        tell: shows a line to whoever watches.

    Raises:
        FleetError: the port is taken, or there is no place for a socket.
    """

    def __init__(self, port: int, announced: Address, tell: Callable[[str], None]) -> None:
        raise_open_files()
        self._announced, self._joined = announced, JoinedLines(tell)
        self._calls = _listener(port)
        self.port: int = self._calls.getsockname()[1]
        self._workers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="varuna-port-"))  # nobody else may enter it
            self.path = str(self._folder / "workers")
            """Path of the socket at which workers say what they wait for."""
            self._workers.bind(self.path)
        except OSError as error:
            for each in (self._calls, self._workers):
                each.close()
            raise FleetError(
                f"cannot make a socket in {tempfile.gettempdir()} for this machine's workers: "
                f"{error.strerror or error}. Set TMPDIR to another folder, with a short path and some space"
            ) from error
        self._workers.listen(64)
        self.relay = Relay(host=announced.host, port=announced.port, word=secrets.token_hex(WORD_BYTES // 2))
        """Address and word with which others have their connections joined here."""
        self._selector = selectors.DefaultSelector()
        self._callers: dict[_Caller, None] = {}  # in the order in which they came
        self._waiting: dict[bytes, socket.socket] = {}  # workers, by word
        self._halves: dict[bytes, _Caller] = {}  # of pairs
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="varuna-port", daemon=True)

    def start(self) -> None:
        """Let in whoever calls."""
        for listener, take in ((self._calls, self._accept), (self._workers, self._let_wait)):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, take)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Close the port, and what is joined here; what was handed over stays."""
        self._wake.close()
        if self._thread.is_alive():
            self._thread.join(10.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- on the thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(_TICK_S):
                    if key.fileobj is self._woken:
                        return
                    key.data()
                self._expire(time.monotonic())
        finally:
            for each in [key.fileobj for key in self._selector.get_map().values()]:
                assert isinstance(each, socket.socket)
                each.close()
            for half in self._halves.values():
                half.connected.close()
            self._selector.close()
            self._joined.close()

    def _let_wait(self) -> None:
        """A worker begins to wait for callers."""
        with contextlib.suppress(OSError):
            worker, _ = self._workers.accept()
            worker.setblocking(False)
            self._selector.register(worker, selectors.EVENT_READ, lambda: self._hear_worker(worker))

    def _hear_worker(self, worker: socket.socket) -> None:
        try:
            word = worker.recv(WORD_BYTES + 1)
            if len(word) == WORD_BYTES and self._waiting.setdefault(word, worker) is worker:
                worker.send(json.dumps([[self._announced.host, self._announced.port], self.port]).encode())
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # it is gone
        self._selector.unregister(worker)
        worker.close()
        self._waiting = {word: each for word, each in self._waiting.items() if each is not worker}

    def _accept(self) -> None:
        try:
            connected, _ = self._calls.accept()
        except OSError:  # it is gone again
            return
        if len(self._callers) >= _MOST_CALLERS:  # the oldest has had the longest time to speak
            self._drop(next(iter(self._callers))).close()
        connected.setblocking(False)
        caller = _Caller(connected, time.monotonic() + _SPEAKS_S)
        self._callers[caller] = None
        self._selector.register(connected, selectors.EVENT_READ, lambda: self._hear(caller))

    def _hear(self, caller: _Caller) -> None:
        if caller not in self._callers:  # dropped by what came at the same time
            return
        try:
            more = caller.connected.recv(caller.awaited_bytes - len(caller.heard))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        caller.heard += more
        if not more:
            self._drop(caller).close()
        elif len(caller.heard) == caller.awaited_bytes:
            self._answer(caller)

    def _answer(self, caller: _Caller) -> None:
        """Do what a caller came for, now that it has said so."""
        word, pair = caller.heard[:WORD_BYTES], caller.heard[WORD_BYTES:]
        if not pair and secrets.compare_digest(word, self.relay.word.encode()):
            caller.awaited_bytes += _PAIR_BYTES
            return
        connected = self._drop(caller)
        if pair:
            self._pair(pair, caller)
            return
        if (worker := self._waiting.get(word)) is not None:
            with contextlib.suppress(OSError):  # it takes nothing, or has ended
                hand_over(worker, connected)
        connected.close()

    def _pair(self, pair: bytes, caller: _Caller) -> None:
        if (other := self._halves.pop(pair, None)) is not None:
            self._joined.join_connections(other.connected, caller.connected)
        elif len(self._halves) < _MOST_CALLERS:
            self._halves[pair] = caller
            caller.until_s = time.monotonic() + _JOINS_S
        else:
            caller.connected.close()

    def _drop(self, caller: _Caller) -> socket.socket:
        self._selector.unregister(caller.connected)
        del self._callers[caller]
        return caller.connected

    def _expire(self, now_s: float) -> None:
        for caller in [each for each in self._callers if now_s >= each.until_s]:
            self._drop(caller).close()
        for pair in [pair for pair, half in self._halves.items() if now_s >= half.until_s]:
            self._halves.pop(pair).connected.close()


def _listener(port: int) -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=_MOST_CALLERS, dualstack_ipv6=is_dual)
    except OSError as error:
        raise FleetError(
            f"cannot listen at --port {port}: {error.strerror or error}. Choose a free port, and announce where others "
            "reach it with --announce"
        ) from error
