"""Tells at once when a capture meets something that only its own process can run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_tell: ContextVar[Callable[[], None] | None] = ContextVar("tell", default=None)


@contextmanager
def reporting(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` for each such thing that this thread's capture meets."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def met() -> None:
    """Report something that only this process can run."""
    if (tell := _tell.get()) is not None:
        tell()
