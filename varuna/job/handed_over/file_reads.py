"""A watch on files that captured code has read: they were read once, before step 0, with the contents of then."""

import hashlib
import inspect
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType
from typing import Any, NamedTuple

from varuna.job.handed_over.code_reads import is_library
from varuna.partition.watching.own_code import VARUNA

_CONTENT_BYTES = 2**24
"""A larger file is compared by size and time only."""
_MOST = 256
"""Files that are watched: each is looked at after every turn of the script."""
_CODE = (".py", ".pyc", ".so")
"""Read when something is imported, or a line is shown."""
_OF_THE_MACHINE = ("/proc/", "/sys/", "/dev/")
_NOTING: list[tuple[int, Callable[[str], None]]] = []
"""Threads that capture now, and what notes the paths that they open."""


@cache
def _watch_opens() -> None:
    """Hear of each file that is opened, also by libraries; for good, since Python removes no audit hook."""

    def hear(event: str, details: tuple[Any, ...]) -> None:
        if _NOTING and event == "open" and isinstance(details[0], str | bytes):
            mode, flags = details[1:]
            is_read = not set(mode) & set("wax+") if mode else flags & os.O_ACCMODE == os.O_RDONLY
            for thread, note in _NOTING[:] if is_read else ():
                if thread == threading.get_ident():
                    note(os.path.abspath(os.fsdecode(details[0])))

    sys.addaudithook(hear)


class FileChanged(NamedTuple):
    """A file that is not as captured code read it."""

    path: str
    read_at: str
    """file and line of the user's code"""


class _Version(NamedTuple):
    stamp: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, path: str, before: "_Version | None" = None) -> "_Version":
        """Return the version of now; a file with the same stamp as before is not read. A missing one has none."""
        try:
            found = os.stat(path)
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if before is not None and before.stamp == stamp:
                return before
            if found.st_size > _CONTENT_BYTES or not stat.S_ISREG(found.st_mode):  # to open a pipe may wait for ever
                return cls(stamp, repr(stamp).encode())
            with open(path, "rb") as file:
                return cls(stamp, hashlib.blake2b(file.read(), digest_size=16).digest())
        except OSError:
            return cls((), b"")


class FileReads:
    """Files that captured code opens, with their contents."""

    def __init__(self, functions: Iterable[Any]) -> None:
        """Begin without any.

        Args:
            functions: that are captured, beside all that are named ``forward``.
        """
        self._codes = {code for each in functions if (code := _code_of(each)) is not None}
        self._read: dict[str, tuple[str, _Version]] = {}  # by path: where it was read, and its version

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what captured functions open for reading, in this block, on this thread."""
        noting = (threading.get_ident(), self._note)
        _NOTING.append(noting)
        _watch_opens()
        try:
            yield
        finally:
            _NOTING.remove(noting)

    def changed(self) -> FileChanged | None:
        """Return a file whose contents differ from those that were read."""
        for path, (place, version) in self._read.items():
            now = _Version.of(path, version)
            if now.content != version.content:
                return FileChanged(path, place)
            if now is not version:
                self._read[path] = (place, now)
        return None

    def _note(self, path: str) -> None:
        is_data = not (path.endswith(_CODE) or path.startswith(_OF_THE_MACHINE) or is_library(path))
        is_new = is_data and path not in self._read and len(self._read) < _MOST
        if is_new and (place := self._captured_at()):
            self._read[path] = (place, _Version.of(path))

    def _captured_at(self) -> str:
        """File and line of the user's code, if it runs within a captured function; else empty."""
        place, is_captured, frame = "", False, sys._getframe(3)
        while frame is not None and not frame.f_code.co_filename.startswith(VARUNA):
            code = frame.f_code
            if not is_library(code.co_filename) and not code.co_filename.startswith("<"):
                place = place or f"{code.co_filename}:{frame.f_lineno}"
                is_captured |= code.co_name == "forward" or code in self._codes
            frame = frame.f_back  # type: ignore[assignment]
        return place if is_captured else ""


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    found = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return found if isinstance(found, CodeType) else None
