"""Child processes that die with their parent, even if it is killed before any code of theirs runs."""

import os
import sys
from pathlib import Path


def tether() -> list[str]:
    """Return a command's prefix by which it dies with the *thread* that starts it, even before any code of ours."""
    if sys.platform != "linux":
        return []  # there a closed connection or pipe has to do
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("tether.py")), str(os.getpid())]
