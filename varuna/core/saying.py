"""What a process says to people who read its standard error."""

import sys


def say(text: str) -> None:
    """One line, with the name of who says it; at once, since the process may be killed."""
    print(f"varuna: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """As ``say``, for what somebody should look at."""
    say(f"warning: {text}")
