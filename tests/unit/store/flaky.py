"""Failures of stores, and time that passes only when somebody sleeps."""

from varuna.core.errors import StoreUnavailable


class Time:
    """A clock, and a sleep that moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def down(verb: str, name: str) -> None:
    raise StoreUnavailable(f"cannot {verb} {name}: connection refused")
