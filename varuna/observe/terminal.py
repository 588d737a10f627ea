"""Lines on a terminal or in a log: permanent ones, one that is replaced, and the script's own between them."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.text import Text

from varuna.fleet.service.service import pass_on

_DRAWN_EVERY_S = 0.1
_LOGGED_EVERY_S = 30.0
_CLEAR, _CYAN, _PLAIN = "\r\x1b[2K", "\x1b[36m", "\x1b[0m"


class Progress:
    """Writes to ``console``: one live line if it is a terminal, else a plain line every ``every_s`` seconds.

    Any thread may call it. The live line is away while others write, and a log never gets a carriage return of ours.

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
        """The line is replaced where it stands."""
        self._lock = threading.RLock()
        self._written_s = self._drawn_s = float("-inf")
        self._line = ""
        self._is_drawn, self._is_within_line = False, False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._clear()
            self._line = ""

    def show(self, line: str, *, final: bool = False) -> None:
        """Replace the progress line; without a terminal, print it if the last one is old, or it is the final one."""
        now_s = self._clock()
        with self._lock:
            if self.is_live:
                is_new, self._line = line != self._line or not self._is_drawn, line
                if is_new and (final or now_s - self._drawn_s >= _DRAWN_EVERY_S):
                    self._draw(now_s)
            elif self._has_line and (final or now_s - self._written_s >= self._every_s):
                self._written_s = now_s
                self.tell(line)

    def refresh(self) -> None:
        """Draw the progress line again, if something else was written since."""
        with self._lock:
            if self._line and not self._is_drawn:
                self._draw(self._clock())

    def tell(self, line: str, style: str = "") -> None:
        """Print a permanent line, never wrapped by us."""
        with self._lock:
            self._clear()
            if self._is_within_line:
                self.console.file.write("\n")
                self._is_within_line = False
            self.console.print(Text(line, style=style), soft_wrap=True, highlight=False)

    def write(self, data: bytes, write: Callable[[bytes], None]) -> None:
        """Let somebody else write to the same terminal: the live line comes back after a whole line."""
        with self._lock:
            self._clear()
            write(data)
            self._is_within_line = self.is_live and not data.endswith(b"\n")

    def _draw(self, now_s: float) -> None:
        if self._is_within_line:
            return
        file, line = self.console.file, self._line[: max(1, self.console.width - 1)]
        file.write(_CLEAR + (line if self.console.no_color else f"{_CYAN}{line}{_PLAIN}"))
        file.flush()
        self._drawn_s, self._is_drawn = now_s, True

    def _clear(self) -> None:
        if self._is_drawn:
            self.console.file.write(_CLEAR)
            self.console.file.flush()
            self._is_drawn = False


def beside_a_script() -> tuple[Progress, Callable[[bytes], None]]:
    """For standard error, and what passes on the script's lines: a live line only where both end on one terminal.

    There both go the same way, or one could overtake the other.
    """
    is_shared = _share_one_terminal()
    progress = Progress(Console(stderr=True), redraws=is_shared, every_s=_LOGGED_EVERY_S)
    stream = sys.stderr if is_shared else sys.stdout
    return progress, lambda line: progress.write(line, lambda data: pass_on(data, stream))


def _share_one_terminal() -> bool:
    try:
        return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return False
