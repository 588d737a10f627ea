"""A stand-in for NCCL, over sockets of this machine, between threads or processes.

As with NCCL, a call is queued on a stream, blocks it until the peers have made theirs, and never ends if they do not:
not when a peer dies or freezes, but when the communicator is aborted.
"""

import itertools
import os
import socket
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from tests.unit.engine.late import WAITING, Borrower, LateStream
from varuna.core.devices import DeviceFacts

_here = itertools.count()
Steps = Generator[None, None, None]


class _Call(Borrower):
    """One call on a stream; goes on when it is asked."""

    def __init__(self, communicator: "WireCommunicator", value: Tensor, steps: Callable[["_Call"], Steps]) -> None:
        super().__init__(value)
        self._communicator, self._steps = communicator, steps(self)

    def __call__(self) -> object:
        if self._communicator.aborted:
            return None
        try:
            next(self._steps)
        except StopIteration:
            return None
        return WAITING


class WireCommunicator:
    """``engine.links.gpu_links.Communicator``; member 0 is connected to all others."""

    def __init__(self, rank: int, size: int, port: int, listener: socket.socket | None) -> None:
        self.rank, self.size, self.calls, self.aborted = rank, size, list[str](), False
        self._failure: str | None = None
        self._listener, self._unknown = listener, list[socket.socket]()
        self._peers: dict[int, socket.socket] = {}
        self._connecting: Steps | None = self._accept() if listener else self._greet(port)

    def send(self, buffer: Tensor, peer: int, stream: LateStream) -> None:
        def steps(call: _Call) -> Steps:
            yield from self._read(peer, 1)  # the peer is there
            yield from self._write(peer, call.memory().numpy().tobytes())

        self._queue("send", buffer, steps, stream)

    def receive(self, buffer: Tensor, peer: int, stream: LateStream) -> None:
        def steps(call: _Call) -> Steps:
            yield from self._write(peer, b"!")
            found = yield from self._read(peer, call.memory().nbytes)
            call.memory().copy_(torch.frombuffer(found, dtype=torch.uint8))

        self._queue("receive", buffer, steps, stream)

    def all_reduce(self, values: Tensor, stream: LateStream) -> None:
        def steps(call: _Call) -> Steps:
            mine = call.memory().detach()
            if self.rank:
                yield from self._write(0, mine.numpy().tobytes())
                found = yield from self._read(0, mine.nbytes)
                mine.copy_(torch.frombuffer(found, dtype=torch.float32))
                return
            for peer in range(1, self.size):
                found = yield from self._read(peer, mine.nbytes)
                mine += torch.frombuffer(found, dtype=torch.float32)
            for peer in range(1, self.size):
                yield from self._write(peer, mine.numpy().tobytes())

        self._queue("sum", values, steps, stream)

    def ready(self) -> bool:
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        if self._connecting is not None and next(self._connecting, WAITING) is WAITING:
            self._connecting = None
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return self._connecting is None

    def abort(self) -> None:
        self.aborted = True
        for connection in (*self._peers.values(), *self._unknown, *([self._listener] if self._listener else [])):
            connection.close()

    def _queue(self, name: str, value: Tensor, steps: Callable[[_Call], Steps], stream: LateStream) -> None:
        self.calls.append(name)
        stream.put(_Call(self, value, steps))

    def _accept(self) -> Steps:
        assert self._listener is not None
        self._listener.setblocking(False)
        while len(self._peers) < self.size - 1:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                yield
                continue
            connection.setblocking(True)
            self._unknown.append(connection)
            self._peers[connection.recv(1)[0]] = connection
            connection.setblocking(False)
        for peer in self._peers:
            yield from self._write(peer, b"+")

    def _greet(self, port: int) -> Steps:
        self._peers[0] = socket.create_connection(("127.0.0.1", port))
        self._peers[0].sendall(bytes([self.rank]))
        self._peers[0].setblocking(False)
        yield from self._read(0, 1)

    def _read(self, peer: int, size_bytes: int) -> Generator[None, None, bytearray]:
        found = bytearray()
        while len(found) < size_bytes:
            try:
                part = self._peers[peer].recv(size_bytes - len(found))
            except BlockingIOError:
                part = None
            except OSError:
                part = b""
            if part == b"":
                self._failure = "NCCL: remote process exited or there was a network error"
            found += part or b""
            if not part:
                yield
        return found

    def _write(self, peer: int, data: bytes) -> Steps:
        while data:
            try:
                data = data[self._peers[peer].send(data) :]
            except BlockingIOError:
                yield
            except OSError:
                self._failure = "NCCL: remote process exited or there was a network error"
                yield


def own_gpu(name: str | None = None) -> DeviceFacts:
    """A GPU that nobody shares, or the one with this name."""
    return DeviceFacts(name=name or f"{os.getpid()}/{next(_here)}", memory_bytes=2**40)


class Wire:
    """``engine.links.gpu_links.Fabric`` of a worker."""

    def __init__(self) -> None:
        self._listeners: dict[int, socket.socket] = {}
        self.made: list[WireCommunicator] = []

    def bind(self, interface_host: str) -> None:
        assert interface_host == "127.0.0.1"

    def new_identity(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        self._listeners[port] = listener
        return port.to_bytes(128, "big")

    def connect(self, identity: bytes, rank: int, size: int) -> WireCommunicator:
        port = int.from_bytes(identity, "big")
        self.made.append(WireCommunicator(rank, size, port, None if rank else self._listeners.pop(port)))
        return self.made[-1]
