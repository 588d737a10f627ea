"""Lines that a process prints to standard error for its user."""

import sys
from contextlib import suppress
from functools import cache


def say(text: str) -> None:
    """Print one line to standard error, with the program's name, and flush it, since the process may be killed.

    A reader that is gone, or a full disk, must not stop whoever has something to say.
    """
    with suppress(OSError, ValueError):  # ValueError: closed
        print(f"varuna: {text}", file=sys.stderr, flush=True)


@cache
def say_once(text: str) -> None:
    """Print a line like ``say``, the first time that this process is to print it."""
    say(text)


def warn(text: str) -> None:
    """Print a line like ``say``, marked as a warning that somebody should look at."""
    say(f"warning: {text}")
