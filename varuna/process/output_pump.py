"""Standard output and error that need no reader: Ctrl-S, ``| less`` or a hung ssh hold no thread of ours up.

A thread of its own writes to the terminal or pipe. What waits for it has a bound; lines beyond that are left out, and
a line says how many.
"""

import contextlib
import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

WAITING_BYTES = 4 * 2**20
"""Bytes that may wait for a reader."""
_STUCK_S = 5.0
_POLL_S = 0.05


class Pump:
    """Bytes on their way to a reader that may not read; ``write`` and ``close`` may be called by any thread.

    Args:
        sink: writes, for as long as that takes; returns how much it wrote. After an error it is not called again.
        limit_bytes: what may wait.
    """

    def __init__(self, sink: Callable[[bytes], int], *, limit_bytes: int = WAITING_BYTES) -> None:
        self._sink, self._limit_bytes = sink, limit_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._left_out = self._written_bytes = 0
        self._changed = threading.Condition()
        self._is_closing = self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="varuna-outlet", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue bytes, or leave them out; returns at once."""
        with self._changed:
            if self._is_broken or not data:
                return
            if self._waiting_bytes + len(data) > self._limit_bytes:
                self._left_out += max(1, data.count(b"\n"))
                return
            if self._left_out:
                self._append(_missing(self._left_out))
                self._left_out = 0
            self._append(data)

    def close(self, stuck_s: float = _STUCK_S) -> bool:
        """Wait for what is on its way, for as long as it is read; False if nothing was for ``stuck_s``."""
        with self._changed:
            if self._left_out:
                self._append(_missing(self._left_out))
                self._left_out = 0
            self._is_closing = True
            self._changed.notify_all()
        before, since_s = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            if self._written_bytes != before:
                before, since_s = self._written_bytes, time.monotonic()
            elif time.monotonic() > since_s + stuck_s:
                return False
        return True

    def _append(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            try:
                rest = data
                while rest:
                    done = self._sink(rest)
                    self._written_bytes += done
                    rest = rest[done:]
            except (OSError, ValueError):  # a reader that is gone (``| head``), a full disk; ValueError: closed
                with self._changed:
                    self._is_broken = True
                    self._waiting.clear()
                    self._waiting_bytes = 0
                return
            with self._changed:
                self._waiting_bytes -= len(data)


def _missing(lines: int) -> bytes:
    return f"\n[varuna: output was not read in time: {lines} lines dropped here; the logs have them]\n".encode()


class Outlet(io.TextIOBase):
    """Takes the place of ``sys.stdout`` or ``sys.stderr``: text and, by ``buffer``, bytes."""

    def __init__(self, pump: Pump, like: IO[str]) -> None:
        self._pump, self._descriptor = pump, like.fileno()
        self._encoding = getattr(like, "encoding", None) or "utf-8"
        self.buffer = _Bytes(pump)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io calls it a variable
        """Encoding of the wrapped stream."""
        return self._encoding

    def write(self, text: str) -> int:
        """Queue text for the wrapped stream."""
        self._pump.write(text.encode(self._encoding, errors="replace"))
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Return the file descriptor of the wrapped stream."""
        return self._descriptor


class _Bytes(io.RawIOBase):
    def __init__(self, pump: Pump) -> None:
        self._pump = pump

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        content = bytes(memoryview(data))  # type: ignore[arg-type]  # any buffer
        self._pump.write(content)
        return len(content)


@contextlib.contextmanager
def unread_allowed(stuck_s: float = _STUCK_S) -> Iterator[None]:
    """Let this process never wait for a reader of what it prints in this block.

    At the end what was printed goes out, unless nothing is read for ``stuck_s``: then the rest is lost, and later
    prints go the same way, since a process must end.
    """
    names = [name for name in ("stdout", "stderr") if _has_descriptor(getattr(sys, name))]
    before = {name: getattr(sys, name) for name in names}
    pumps: dict[str, Pump] = {}
    for name, stream in before.items():
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        pumps[name] = _pump_to(stream.fileno())
        setattr(sys, name, Outlet(pumps[name], stream))
    try:
        yield
    finally:
        for name, pump in pumps.items():
            if pump.close(stuck_s):
                setattr(sys, name, before[name])


def _pump_to(descriptor: int) -> Pump:
    return Pump(lambda data: os.write(descriptor, data))


def _has_descriptor(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # closed, or a test's
        return False
    return True
