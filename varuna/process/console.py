"""Lines that a process prints to standard error for its user."""

import sys


def say(text: str) -> None:
    """Print one line to standard error, with the program's name, and flush it, since the process may be killed."""
    print(f"varuna: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a line like ``say``, marked as a warning that somebody should look at."""
    say(f"warning: {text}")
