"""Bytes of a pipe as lines, with bounds: a progress bar writes one line for hours. Pure."""

import re
from collections import deque

LINE_BYTES = 8 * 2**10
"""Bytes of the longest line that stays whole; longer ones come in pieces."""
TAIL_BYTES = 64 * 2**10
_TAIL_LINES = 200
_END = re.compile(rb"\r\n|\n|\r")


class Lines:
    """Cuts a stream after each line feed, carriage return, or both; holds at most one unfinished line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that are complete now, ends included, and pieces of one that is too long."""
        data = self._rest + data
        found: list[bytes] = []
        begin = 0
        for match in _END.finditer(
            data, 0, len(data) - data.endswith(b"\r")
        ):  # what follows may be the \n of a last \r
            found.extend(_pieces(data[begin : match.end()]))
            begin = match.end()
        rest = data[begin:]
        while len(rest) > LINE_BYTES:
            found.append(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        self._rest = rest
        return found

    def rest(self) -> bytes:
        """Return the last line if it has no end yet."""
        rest, self._rest = self._rest, b""
        return rest


class Tail:
    """The newest lines, within bounds."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line; the oldest ones go."""
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > _TAIL_LINES or self._bytes > TAIL_BYTES:
            self._bytes -= len(self._lines.popleft())

    def text(self) -> str:
        """Return the lines as one text."""
        return b"".join(self._lines).decode(errors="replace")


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + LINE_BYTES] for start in range(0, len(line), LINE_BYTES)]
