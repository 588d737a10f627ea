"""A connection whose line is slow: messages are compressed, arrive bit by bit, and damage ends it in words."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from varuna.core.times import Compressed
from varuna.engine.base.codec import Codec, Form
from varuna.engine.base.connection import Connection, bytes_of

NUMBERS, A_ROUND = 100_000, 12
SMALL_BYTES = 2**14
PAUSE_S = 0.001


class SlowLine:
    """Passes on what one end sends, some bytes after a pause each; the way back is not used."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
            self.near = socket.socket()
            self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * SMALL_BYTES)
            self.near.bind(("127.0.0.2", 0))  # another machine's, as far as addresses tell
            self.near.connect(listener.getsockname())
            self._into, _ = listener.accept()
            self._out = socket.create_connection(listener.getsockname())
            self.far, _ = listener.accept()
        self._over = threading.Event()
        self.passed_bytes = 0
        ways = ((self._into, self._out, True), (self._out, self._into, False))
        self._threads = [threading.Thread(target=self._pass_on, args=way, daemon=True) for way in ways]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        with contextlib.suppress(OSError):  # an end is gone
            while data := source.recv(SMALL_BYTES):
                if is_slow:
                    self._over.wait(PAUSE_S)
                    self.passed_bytes += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._over.set()
        for each in (self._into, self._out):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        self._into.close()
        self._out.close()


@pytest.fixture
def line() -> Iterator[SlowLine]:
    made = SlowLine()
    yield made
    made.close()


def values(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sent_over(line: SlowLine, *, compresses: bool, rounds: int) -> Compressed:
    """Send rounds of messages until something was compressed; all must arrive as they were."""
    one, other = Connection(line.near, "to b", compresses=compresses), Connection(line.far, "to a")
    given = [values(seed) for seed in range(A_ROUND)]
    for _ in range(rounds):
        rooms = [torch.empty_like(each) for each in given]
        works = [(one.send(each, 1), other.receive(room, 1)) for each, room in zip(given, rooms, strict=True)]
        for (_, coming), sent, room in zip(works, given, rooms, strict=True):
            coming.wait(30)
            assert torch.equal(room.view(torch.int16), sent.view(torch.int16))
        if one.compressed.size_bytes:
            break
    one.end()
    other.end()
    return one.compressed


def test_what_waits_for_a_slow_line_is_compressed_and_no_bit_changes(line: SlowLine) -> None:
    assert sent_over(line, compresses=True, rounds=40).ratio > 1.3


def test_a_connection_that_may_not_compress_does_not(line: SlowLine) -> None:
    assert sent_over(line, compresses=False, rounds=1) == Compressed()
    assert line.passed_bytes >= A_ROUND * 2 * NUMBERS


def test_nothing_is_compressed_within_a_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    one, other = Connection(near, "to b", compresses=True), Connection(far, "to a")
    for _ in range(10):
        room = torch.empty(NUMBERS)
        coming = other.receive(room, 1)
        one.send(torch.zeros(NUMBERS), 1).wait(30)
        coming.wait(30)
    assert one.compressed == Compressed()
    one.end()
    other.end()


def frame(given: Tensor) -> bytearray:
    """A message as it crosses compressed; it fills one part."""
    body = b"".join(Codec().encode(bytes_of(given), Form(2, 1)))
    return bytearray(struct.pack("<qqB", 1, given.nbytes, 2) + body)


@pytest.mark.parametrize(
    ("at", "said"), [(19, "is no header"), (-1, "has checksum"), (40, "decompress|bytes where|checksum")]
)
def test_a_damaged_message_ends_the_connection_in_words(line: SlowLine, at: int, said: str) -> None:
    given = values(0)[:50_000]
    connection, raw = Connection(line.far, "to a"), line.near
    for is_damaged in (False, True):
        room = torch.zeros_like(given)
        coming = connection.receive(room, 1)
        crossing = frame(given)
        crossing[at] ^= 0xFF if is_damaged else 0
        raw.sendall(crossing)
        if not is_damaged:
            assert torch.equal(coming.wait(30), given)
            continue
        with pytest.raises(RuntimeError, match=rf"a compressed part .*({said}).*\(to a\)"):
            coming.wait(30)
    raw.close()
