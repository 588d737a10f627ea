"""A terminal of so many columns and rows: a command runs in it, and its screen is text."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.scenarios.launch import environment

_PIECES = re.compile(r"\x1b\[(?P<number>\d*)(?P<what>[AJKm])|\x1b\[[\d;]*m|\x1b\[\?\d+[hl]|[\r\n]|[^\x1b\r\n]")


class Screen:
    """As much of a terminal as the live view needs; anything else that is written to it is an error.

    Lines that scroll away are kept in ``above``.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.above: list[str] = []
        self._lines = [""]
        self._row = self._column = 0
        self._rest = ""

    def write(self, data: bytes) -> None:
        """Take what a program has printed."""
        text, at = self._rest + data.decode(errors="replace"), 0
        while at < len(text):
            piece = _PIECES.match(text, at)
            if piece is None:
                assert len(text) - at < 12, f"no terminal of ours knows {text[at : at + 20]!r}"
                break  # the rest of a sequence is still to come
            self._piece(piece)
            at = piece.end()
        self._rest = text[at:]

    def _piece(self, piece: "re.Match[str]") -> None:
        match piece["what"], piece[0]:
            case "A", _:
                self._row = max(0, self._row - int(piece["number"] or 1))
            case "K", _:
                self._lines[self._row] = ""
            case "J", _:
                self._lines[self._row] = self._lines[self._row][: self._column]
                del self._lines[self._row + 1 :]
            case _, "\r":
                self._column = 0
            case _, "\n":
                self._down()
            case _, text if not text.startswith("\x1b"):
                if self._column == self.columns:
                    self._column = 0
                    self._down()
                line = self._lines[self._row].ljust(self._column)
                self._lines[self._row] = line[: self._column] + text + line[self._column + 1 :]
                self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
        if len(self._lines) > self.rows:
            self.above.append(self._lines.pop(0))
            self._row -= 1

    @property
    def text(self) -> str:
        """Text that stands on the screen now."""
        return "\n".join(line.rstrip() for line in self._lines)

    @property
    def whole(self) -> str:
        """The same, below all that has scrolled away."""
        return "\n".join([*(line.rstrip() for line in self.above), self.text])


class Terminal:
    """A process and its screen."""

    def __init__(self, pid: int, descriptor: int, screen: Screen) -> None:
        self.pid, self._descriptor, self.screen = pid, descriptor, screen
        self.code: int | None = None

    def until(self, seen: Callable[[str], bool], bound_s: float) -> str:
        """Follow the screen until it is as wanted; returns it."""
        deadline_s = time.monotonic() + bound_s
        while not seen(self.screen.text):
            assert time.monotonic() < deadline_s, f"not seen within {bound_s} s:\n{self.screen.whole}"
            assert self._follow(), f"it ended:\n{self.screen.whole}"
        return self.screen.text

    def end(self, bound_s: float) -> int:
        """Follow the screen to the end of the process; returns its exit code."""
        deadline_s = time.monotonic() + bound_s
        while self._follow():
            assert time.monotonic() < deadline_s, f"it does not end within {bound_s} s:\n{self.screen.whole}"
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._descriptor, keys)

    def _follow(self) -> bool:
        if select.select([self._descriptor], [], [], 0.1)[0]:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # Linux says so when the other side is gone
                return False
            self.screen.write(data)
            return bool(data)
        return True


@contextmanager
def terminal(command: list[str], columns: int, rows: int, **more: str) -> Iterator[Terminal]:
    """A command on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    modes = termios.tcgetattr(theirs)
    # Ctrl-C would take back output that is on its way, and leave half an escape sequence before its own echo.
    modes[3] = modes[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    settings = environment(TERM="xterm-256color", LANG="C.UTF-8", **more)
    name = os.ttyname(theirs)
    pid = os.posix_spawn(
        command[0],
        command,
        {key: value for key, value in settings.items() if key not in ("COLUMNS", "LINES")},
        file_actions=[(os.POSIX_SPAWN_OPEN, descriptor, name, os.O_RDWR, 0) for descriptor in (0, 1, 2)],
        setsid=True,
    )
    os.close(theirs)
    shown = Terminal(pid, ours, Screen(columns, rows))
    try:
        yield shown
    finally:
        if shown.code is None:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.close(ours)
