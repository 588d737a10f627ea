"""Spans: where a rank is in its work, live, for tests that kill it there and benchmarks that measure its memory there.

When things happened is in the timeline (``engine.pipeline.timeline``). Without a listener a span costs one comparison.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The ``begin`` or the ``end``, by ``phase``, of a piece of work."""

    name: str
    """F, R, B, I, W, send, reduce, sum, tied, vote, apply, save, generate; form, move, barrier; send-rest, take-rest;
    keep, send-kept, kept, copy-sum, kept-sum; hold, held"""
    phase: str
    rank: int
    stage: int
    step: int
    index: int
    """global micro-batch for F, R, B, I, W, send; section for sum, copy-sum, kept-sum,
    send-rest, take-rest; parameter for tied; generation
    for form, move, barrier, hold, held; token for generate; else -1"""


Listener = Callable[[Span], None]
_listeners: list[Listener] = []
_UNHEARD = nullcontext()


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with every span of this process, on the thread that does the work; returns the undo."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def span(name: str, *, rank: int, stage: int, step: int, index: int = -1) -> AbstractContextManager[None]:
    """Mark the beginning and the end of a piece of work; an exception leaves the end out.

    Args:
        name: see ``Span.name``.
        rank: this rank.
        stage: its stage; -1 for a spare.
        step: the step that the work belongs to.
        index: see ``Span.index``.
    """
    return _heard(name, rank, stage, step, index) if _listeners else _UNHEARD


@contextmanager
def _heard(name: str, rank: int, stage: int, step: int, index: int) -> Iterator[None]:
    _emit(Span(name, "begin", rank, stage, step, index))
    yield
    _emit(Span(name, "end", rank, stage, step, index))


def _emit(mark: Span) -> None:
    for listener in list(_listeners):
        listener(mark)
