"""Lines that a process prints to standard error for its user."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

from varuna.core.plain_text import plain

_writers: list[Callable[[str], None]] = []
"""Functions that draw on the terminal now; the newest one counts."""


def say(text: str) -> None:
    """Print one line to standard error, with the program's name, and flush it, since the process may be killed.

    Causes that other machines name are in many lines: control characters in them do not reach the terminal.

    A reader that is gone, or a full disk, must not stop a thread that has something to say.
    """
    with suppress(OSError, ValueError):  # ValueError: closed
        if _writers:
            _writers[-1](f"varuna: {plain(text)}")
            return
        print(f"varuna: {plain(text)}", file=sys.stderr, flush=True)


@contextmanager
def said_through(write: Callable[[str], None]) -> Iterator[None]:
    """Let lines go through ``write`` in this block, which any thread may call: it draws where standard error goes."""
    _writers.append(write)
    try:
        yield
    finally:
        _writers.remove(write)


@cache
def say_once(text: str) -> None:
    """Print a line like ``say``, the first time that this process is to print it."""
    say(text)


NOTE = "note: "
"""Begins what trains otherwise than in a plain loop: the person who started the workers sees it, too."""


def note(text: str) -> None:
    """Print a line like ``say``, of what trains otherwise than in a plain loop."""
    say(f"{NOTE}{text}")


def warn(text: str) -> None:
    """Print a line like ``say``, marked as a warning, which a person should look at."""
    say(f"warning: {text}")
