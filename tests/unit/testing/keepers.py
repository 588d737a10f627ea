"""Runs in which workers keep each other's state: what has a copy when, and losses at such moments."""

import threading
from collections import Counter
from collections.abc import Callable

from varuna.engine.base.spans import Span
from varuna.engine.stage.sums import SumWanted
from varuna.testing.faults import Fault, Phase


class Waiting(Fault):
    """A worker is lost in the middle of a phase's work, once something else has happened."""

    def __init__(self, rank: int, step: int, phase: Phase, ready: Callable[[], bool], often: int = 0) -> None:
        super().__init__(rank, step, phase, None)
        self._left, self._ready = often, ready

    def on_span(self, span: Span) -> None:
        """Let it pass at first."""
        if (span.phase, span.rank, span.step, span.name) != ("begin", self.rank, self.step, self.phase):
            return
        if self._left:
            self._left -= 1
            return
        assert self.happened or self._ready(), "it did not happen"
        super().on_span(span)


class Kept:
    """The copies that are complete: of a step's state, and on which rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: set[tuple[int, int]] = set()
        self._voted: set[tuple[int, int]] = set()
        self._added: Counter[tuple[int, int]] = Counter()
        self._senders: dict[int, int] = {}  # rank by thread
        self._wanted: dict[int, SumWanted] = {}  # by rank
        self._sent: set[tuple[int, int]] = set()
        self.waiting: tuple[int, int] | None = None
        """so many ranks begin no backward of a step before each has a complete copy of another one's state of it, and
        the sender knows"""
        self.slow: tuple[int, int] | None = None
        """a rank of the first plan that begins backwards of a step only while a copy of its sums is wanted"""

    def hear(self, span: Span) -> None:
        """Note it."""
        if (span.name, span.phase) == ("send-kept", "begin"):
            self._senders[threading.get_ident()] = span.rank
        if span.name == "form" and span.index:
            self.slow = self.waiting = None
        if (span.name, span.phase, span.rank, span.step) == ("B", "begin", *(self.slow or ())):
            assert self.on((span.rank + 1) % 3, step=span.step)()
            assert self._wait(lambda: self._is_wanted(span.rank)), "nobody wants a copy"
        if (span.name, span.phase) == ("B", "begin") and self.waiting is not None and span.step == self.waiting[1]:
            ranks = range(self.waiting[0])
            assert self.on(*ranks, step=span.step)(), "there are no copies"
            assert self._wait(lambda: {(rank, span.step) for rank in ranks} <= self._sent), "they are still being sent"
        noted = {
            ("send-kept", "end"): self._sent,
            ("kept", "end"): self._seen,
            ("apply", "begin"): self._voted,
        }
        with self._changed:
            if (span.name, span.phase) in noted:
                noted[span.name, span.phase].add((span.rank, span.step))
            if (span.name, span.phase) == ("B", "end"):
                self._added[span.rank, span.step] += 1
            self._changed.notify_all()

    def wants(self, wanted: SumWanted) -> None:
        """Note what the sender of copies wants whose thread this is, unless it is one of an earlier run."""
        rank = self._senders.get(threading.get_ident())
        if rank is not None:
            with self._changed:
                self._wanted[rank] = wanted
                self._changed.notify_all()

    def on(self, *ranks: int, step: int) -> Callable[[], bool]:
        """Wait until these ranks have complete copies of a step's state."""
        return lambda: self._wait(lambda: {(rank, step) for rank in ranks} <= self._seen)

    def voted(self, *ranks: int, step: int) -> Callable[[], bool]:
        """Wait until these ranks have the result of a step's vote."""
        return lambda: self._wait(lambda: {(rank, step) for rank in ranks} <= self._voted)

    def added(self, number: int, step: int) -> Callable[[], bool]:
        """Wait until all three ranks have done so many backwards of a step."""
        return lambda: self._wait(lambda: all(self._added[rank, step] >= number for rank in range(3)))

    def _is_wanted(self, rank: int) -> bool:
        wanted = self._wanted.get(rank)
        return wanted is not None and not wanted.taken.is_set()

    def _wait(self, ready: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, 20)
