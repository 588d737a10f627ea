"""Micro-batches prepared ahead of time, off the training thread."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from varuna.core.errors import DataError
from varuna.data.micro_batch import MicroBatch
from varuna.data.readers import SampleRequest
from varuna.data.samples import SampleSource
from varuna.process.threads import start

Deliver = Callable[[int, int, MicroBatch | BaseException], None]


class _Work(NamedTuple):
    """A micro-batch to read and collate."""

    step: int
    micro_batch: int
    positions: Sequence[int]
    keys: tuple[str, ...] | None
    compared: bool


class Loader:
    """A daemon thread that reads micro-batches in the order requested and hands each to ``deliver``.

    At most ``lookahead`` micro-batches are in preparation or delivered and not yet taken, so memory is bounded. Where
    processes read, each of them holds one more until its turn comes.

    ``deliver(step, micro_batch, batch)`` runs on the loader's thread; an exception takes the batch's place.

    Lock order: ``request`` and ``taken`` never wait for a delivery. ``cancel`` and ``close`` do, so they must not
    be called while holding a lock that ``deliver`` takes.
    """

    def __init__(self, source: SampleSource, *, deliver: Deliver, lookahead: int = 4) -> None:
        """Start the thread, which waits for requests."""
        self._source, self._reading = source, source.reading()
        self._deliver = deliver
        self._lookahead = lookahead
        self._changed = threading.Condition()  # guards the fields below
        self._queue: deque[_Work] = deque()
        self._asked: deque[tuple[_Work, DataError | None]] = deque()  # to be fetched in this order
        self._asked_round = 0
        self._open = 0  # micro-batches in preparation, or delivered and not taken
        self._round = 0  # counts cancels: work of an earlier round is dropped
        self._closed = False
        self._delivering = threading.RLock()  # held during a delivery; re-entrant so that deliver may cancel
        self._thread = start("loader", self._run)

    @property
    def at_once(self) -> int:
        """Number of micro-batches that are read at the same time, if enough are requested."""
        return self._reading.count

    def request(
        self,
        step: int,
        work: Iterable[tuple[int, Sequence[int]]],
        keys: Iterable[str] | None = None,
        *,
        compared: bool = True,
    ) -> None:
        """Append micro-batches of ``step`` to the queue.

        Args:
            step: handed back to ``deliver``.
            work: pairs of a micro-batch number and the positions of its samples, in the order of need.
            keys: inputs that this stage uses; None for all.
            compared: another stage reads these samples too, and the digests will be compared.
        """
        wanted = None if keys is None else tuple(keys)
        asked = [_Work(step, number, positions, wanted, compared) for number, positions in work]
        self._source.announce(position for each in asked for position in each.positions)
        with self._changed:
            self._queue.extend(asked)
            self._changed.notify_all()

    def taken(self) -> None:
        """Report that a delivered micro-batch was taken over, so that the next one may be prepared.

        Batches delivered before a ``cancel`` count as taken; a surplus call is ignored.
        """
        with self._changed:
            self._open = max(0, self._open - 1)
            self._changed.notify_all()

    def waited(self, seconds: float) -> None:
        """Report that the training thread has waited for samples."""
        self._reading.waited(seconds)

    def cancel(self) -> None:
        """Drop all requests. When this returns, nothing requested before it is delivered any more."""
        with self._changed:
            self._queue.clear()
            self._open = 0
            self._round += 1
            self._changed.notify_all()
        with self._delivering:  # a delivery that saw the old round has ended once this lock is free
            pass

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel, end the thread, and wait up to ``timeout_s`` for it; a blocked ``dataset[i]`` is left behind."""
        self.cancel()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        """Prepare and deliver until closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue))
        with self._reading.in_use:  # an earlier loader may still wait for a sample
            while (next_work := self._next()) is not None:
                round_, work, failure = next_work
                batch = self._fetch() if failure is None else failure
                with self._delivering:
                    # Compared under the lock that ``cancel`` waits for: after it, nothing of an older round is
                    # delivered.
                    if round_ == self._round:
                        self._deliver(work.step, work.micro_batch, batch)
                del batch  # else the last batch lives on while this thread waits for work
            self._reading.forget()
        del self._deliver  # its owner has this loader: a whole stage would stay until Python looks for such circles

    def _next(self) -> tuple[int, _Work, DataError | None] | None:
        """Have requests read; wait until one may be fetched, which has a free slot; None once closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._may_ask() or self._may_fetch())
                if self._closed:
                    return None
                if self._asked_round != self._round:
                    self._asked_round = self._round
                    self._asked.clear()
                    self._reading.forget()
                elif self._may_ask():
                    self._asked.append(self._ask(self._queue.popleft()))
                else:
                    self._open += 1
                    return self._round, *self._asked.popleft()

    def _may_ask(self) -> bool:
        return self._asked_round != self._round or (bool(self._queue) and self._reading.has_idle)

    def _may_fetch(self) -> bool:
        return bool(self._asked) and self._open < self._lookahead

    def _ask(self, work: _Work) -> tuple[_Work, DataError | None]:
        """Have a micro-batch read; if that cannot be, say why."""
        try:
            self._reading.submit(SampleRequest(tuple(work.positions), work.keys, work.compared))
        except DataError as error:
            return work, error
        return work, None

    def _fetch(self) -> MicroBatch | BaseException:
        """Take one micro-batch; what goes wrong is for the thread that needs it."""
        try:
            return self._reading.fetch()
        except BaseException as error:  # noqa: BLE001  even SystemExit: a silent thread would hang the stage
            return error
