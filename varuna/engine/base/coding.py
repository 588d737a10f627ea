"""Encodes what a connection sends, where that is faster: measures the line, and what encoding costs and saves.

Costs are wall-clock time on a part of a message: on a machine whose processors are busy, encoding costs more.
"""

import fcntl
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

from varuna.core.times import Compressed
from varuna.engine.base.codec import FORMS, PART_BYTES, PLAIN, Codec, Form, Pieces, read_header
from varuna.engine.base.coding_choice import Choice, Fit, Window, chosen, pays

LARGE_BYTES = 2**16
"""Smaller bodies are neither encoded nor looked at."""
_SAMPLE_BYTES = PART_BYTES // 2
_TIOCOUTQ = 0x5411
"""Linux: bytes that a socket has taken and its peer has not confirmed"""


def best_fit(view: memoryview, codec: Codec) -> Fit:
    """Try all forms on the begin of a message, and the best one again, both ways, in seconds."""
    sample = view[:_SAMPLE_BYTES]
    best = min(FORMS, key=lambda form: _size_bytes(codec.encode(sample, form)))
    into = memoryview(bytearray(len(sample)))
    begin_s = time.perf_counter()
    pieces = codec.encode(sample, best)
    encoded_s = time.perf_counter() - begin_s
    header = read_header(pieces[0], len(sample))
    body = memoryview(b"".join(pieces[1:]))
    begin_s = time.perf_counter()
    codec.decode(header, body, into)
    seconds = encoded_s + time.perf_counter() - begin_s
    return Fit(header.form, len(sample) / _size_bytes(pieces), seconds / len(sample))


def _size_bytes(pieces: Pieces) -> int:
    return sum(map(len, pieces))


class _Look(NamedTuple):
    """The socket, when a body was about to be written."""

    at_s: float
    written_bytes: int
    """to it, ever"""
    unsent_bytes: int
    """of them"""


class Coding:
    """Measures one direction of a connection and chooses; used by the thread that has the turn to write."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._codec = connected, Codec()
        self._choice, self._window, self._fits = Choice(), Window(), dict[int, Fit]()
        self._look: _Look | None = None
        self._written_bytes = 0
        self.compressed = Compressed()
        """read by others"""

    @property
    def encodes(self) -> bool:
        """Whether the next large body may be encoded."""
        return self._choice.encodes

    def begin(self, size_bytes: int) -> None:
        """Note that a large body is about to be written."""
        unsent_bytes = _unsent_bytes(self._socket)
        look, before = _Look(time.monotonic(), self._written_bytes, unsent_bytes), self._look
        self._look, window = look, self._window
        window = window._replace(bodies=window.bodies + 1, size_bytes=window.size_bytes + size_bytes)
        if before is not None:
            window = window._replace(seconds=window.seconds + look.at_s - before.at_s)
        # What small frames leave there, or what the peer has yet to confirm, does not tell that the line was busy.
        if before is not None and unsent_bytes >= LARGE_BYTES:
            passed_bytes = look.written_bytes - before.written_bytes - (look.unsent_bytes - before.unsent_bytes)
            window = window._replace(
                waited_bytes=window.waited_bytes + size_bytes,
                busy_s=window.busy_s + look.at_s - before.at_s,
                passed_bytes=window.passed_bytes + passed_bytes,
            )
        self._window = window

    def form_of(self, kind: int, view: memoryview) -> Form:
        """Return the form in which to encode a message; ``PLAIN`` where encoding should not pay."""
        if kind not in self._fits:
            self._fits[kind] = best_fit(view, self._codec)
        fit = self._fits[kind]
        return fit.form if pays(fit, self._choice.plain_s_per_byte) else PLAIN

    def encoded(self, view: memoryview, form: Form) -> Iterable[Pieces]:
        """Encode a message in parts, each when it is asked for."""
        parts = (view[first : first + PART_BYTES] for first in range(0, len(view), PART_BYTES))
        return (self._codec.encode(part, form) for part in parts)

    def end(self, size_bytes: int, sent_bytes: int, *, is_encoded: bool) -> None:
        """Note that a large body has been written."""
        self._written_bytes += sent_bytes
        if is_encoded:
            self.compressed = self.compressed.plus(Compressed(size_bytes, sent_bytes))
        self._window = self._window._replace(written_bytes=self._window.written_bytes + sent_bytes)
        if self._window.is_full:
            after = chosen(self._choice, self._window)
            if after.encodes != self._choice.encodes:  # what was written before does not tell how fast it is now
                self._look = None
                self._fits.clear()
            self._choice, self._window = after, Window()


def _unsent_bytes(connected: socket.socket) -> int:
    if sys.platform != "linux":  # others do not tell: then nothing ever waits
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(connected, _TIOCOUTQ, bytes(4)))[0])
    except OSError:  # the connection has ended
        return 0
