"""Spans: what a rank does and when, for timelines, metrics and fault-injection tests.

The engine calls ``begin`` and ``end`` around its work; without a listener both cost one comparison.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One mark on a rank's timeline; ``phase`` is ``begin`` or ``end``."""

    name: str
    """F, R, B, I, W, reduce, vote, apply, save or form"""
    phase: str
    rank: int
    stage: int
    step: int
    index: int
    """global micro-batch for F, R, B, I, W; section for reduce; generation for form; else -1"""
    time_s: float


Listener = Callable[[Span], None]
_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with every span of this process, on the thread that does the work; returns the undo."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


@contextmanager
def span(name: str, *, rank: int, stage: int, step: int, index: int = -1) -> Iterator[None]:
    """Mark the beginning and the end of a piece of work; an exception leaves the end out."""
    if not _listeners:
        yield
        return
    _emit(Span(name, "begin", rank, stage, step, index, time.monotonic()))
    yield
    _emit(Span(name, "end", rank, stage, step, index, time.monotonic()))


def _emit(mark: Span) -> None:
    for listener in list(_listeners):
        listener(mark)
