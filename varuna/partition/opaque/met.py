"""Tells at once when a capture meets something that only its own process can run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_tell: ContextVar[Callable[[], None] | None] = ContextVar("tell", default=None)


@contextmanager
def reporting(tell: Callable[[], None]) -> Iterator[None]:
    """While a model is captured in this thread, ``tell`` is called for each such thing."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def met() -> None:
    """There is one."""
    if (tell := _tell.get()) is not None:
        tell()
