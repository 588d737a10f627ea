"""Lines on a terminal or in a log: permanent ones, the script's own, and at the bottom what is replaced in place."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.text import Text

from varuna.fleet.service.service import pass_on
from varuna.process.console import said_through
from varuna.process.plain_console import PlainConsole

_DRAWN_EVERY_S = 0.1
_REDRAWN_EVERY_S = 0.02
_LOGGED_EVERY_S = 30.0
_ECHO = 3
"""Columns at the right for ``^C``, which a terminal writes behind the cursor."""
_UP, _CLEAR = "\x1b[{}A", "\r\x1b[J"


class Progress:
    """Writes to ``console``: a picture at the bottom if it is a terminal, else a plain line every ``every_s`` seconds.

    Any thread may call it. What others write goes above the picture, and a log never gets an escape sequence of ours.

    Args:
        console: where lines go.
        live_line: False: only permanent lines are written.
        redraws: False: also a terminal gets plain lines.
        every_s: between plain lines.
        clock: seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        live_line: bool = True,
        redraws: bool = True,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.arrow = "→" if console.encoding.lower().startswith("utf") else "->"
        self._has_line, self._every_s, self._clock = live_line, every_s, clock
        self.is_live = live_line and redraws and console.is_terminal and not console.is_dumb_terminal
        """Whether what is shown is replaced where it stands."""
        self.is_plain = self.arrow == "->"
        """Only ASCII can be written."""
        self._lock = threading.RLock()
        self._written_s = self._drawn_s = float("-inf")
        self._shown: RenderableType = ""
        self._drawn: list[int] = []
        """Columns of each line that stands at the bottom now."""
        self._is_within_line = self._is_over = False
        self._closing = ExitStack()

    def __enter__(self) -> "Progress":
        if self.is_live:
            self._closing.enter_context(said_through(self.print_line))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()
        with self._lock:
            self._clear()
            self._shown, self._is_over = "", True

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines that a picture may have; the rest is for lines above it, and for the terminal itself."""
        return max(20, self.console.width - _ECHO), max(1, self.console.height * 3 // 5)

    def show(self, shown: RenderableType, *, final: bool = False) -> None:
        """Replace what is at the bottom; without a terminal, print a line if the last one is old, or it is the last."""
        now_s = self._clock()
        with self._lock:
            if self.is_live:
                self._shown = shown
                if final or now_s - self._drawn_s >= _DRAWN_EVERY_S:
                    self._draw(now_s)
            elif self._has_line and (final or now_s - self._written_s >= self._every_s):
                self._written_s = now_s
                self.print_line(str(shown))

    def refresh(self) -> None:
        """Draw again what is shown, if something else was written since."""
        with self._lock:
            if not self._drawn:
                self._draw(self._clock())

    def print_line(self, line: str, style: str = "") -> None:
        """Print a permanent line, never wrapped by us."""
        with self._lock:
            self._clear()
            if self._is_within_line:
                self.console.file.write("\n")
                self._is_within_line = False
            self.console.print(Text(line, style=style), soft_wrap=True, highlight=False)
            self._redraw()

    def write(self, data: bytes, write: Callable[[bytes], None]) -> None:
        """Let another writer use the same terminal: the picture comes back after a whole line."""
        with self._lock:
            self._clear()
            write(data)
            self._is_within_line = self.is_live and not data.endswith(b"\n")
            self._redraw()

    def _redraw(self) -> None:
        """Draw the picture again after other lines, unless it was just drawn: then ``refresh`` does."""
        now_s = self._clock()
        if now_s - self._drawn_s >= _REDRAWN_EVERY_S:
            self._draw(now_s)

    def _draw(self, now_s: float) -> None:
        if self._is_within_line or self._is_over or not self._shown or not self.is_live:
            return
        shown = self._shown
        if isinstance(shown, str):
            shown = Group(Text(shown, style="cyan", no_wrap=True, overflow="crop"))
        with self.console.capture() as captured:
            self.console.print(shown, width=self.size[0], end="")
        lines = captured.get().rstrip("\n").split("\n")
        self.console.file.write(self._away() + "\n".join(lines))
        self.console.file.flush()
        self._drawn_s, self._drawn = now_s, [Text.from_ansi(line).cell_len for line in lines]

    def _clear(self) -> None:
        """Clear the picture, and what the terminal itself has written at the bottom, such as ``^C``."""
        if self.is_live and not self._is_within_line and not self._is_over:
            self.console.file.write(self._away())
            self.console.file.flush()
            self._drawn = []

    def _away(self) -> str:
        """Return the codes that remove the lines at the bottom; a terminal that has become narrower has broken them."""
        width = max(1, self.console.width)
        # the cursor stands in the picture's last line, so one line less than it has
        up = sum(max(1, -(-columns // width)) for columns in self._drawn) - 1
        return (_UP.format(up) if up > 0 else "") + _CLEAR


def beside_a_script() -> tuple[Progress, Callable[[bytes], None]]:
    """Return progress on standard error, and a function that passes on the script's lines.

    The line is live only where both end on one terminal. There both go the same way, or one could overtake the other.
    """
    is_shared = _share_one_terminal()
    progress = Progress(PlainConsole(stderr=True), redraws=is_shared, every_s=_LOGGED_EVERY_S)
    stream = sys.stderr if is_shared else sys.stdout
    return progress, lambda line: progress.write(line, lambda data: pass_on(data, stream))


def _share_one_terminal() -> bool:
    try:
        return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return False
