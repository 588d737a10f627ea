"""Versions: of Varuna, and of what it runs on, for modules that need them without importing the whole package."""

__version__ = "0.1.0"

TORCH = ((2, 11), (2, 16))
"""Versions of torch that this Varuna is tested with: from the first on, before the second."""
OLDEST_TORCH = (2, 9)
"""Before it, what a capture relies on is missing."""
TORCH_RANGE = ",".join(f"{sign}{major}.{minor}" for sign, (major, minor) in zip((">=", "<"), TORCH, strict=True))
"""The same for pip; the extra ``torch`` in pyproject.toml says it too."""


def series(version: str) -> tuple[int, int]:
    """Return ``(2, 13)`` of ``"2.13.0+cpu"``; ``(0, 0)`` of what is no version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0].partition("+")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def is_tested_torch(version: str) -> bool:
    """Return whether this version of torch lies in ``TORCH``."""
    return TORCH[0] <= series(version) < TORCH[1]
