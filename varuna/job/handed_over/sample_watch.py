"""A watch on samples: some of the run's first ones are read again while the script has control.

So a change is found however the loop makes it, where no code tells: in a file, a database, shared memory, an event or a
queue. The samples of a step were read ahead, with the value of before.
"""

import time
from contextlib import suppress
from types import FrameType

from varuna.core.errors import UsageError
from varuna.core.sample_digest import is_same_sample
from varuna.data.randomness import generator_lock
from varuna.data.samples import SampleSource
from varuna.job.handed_over.watching import DATASET, at_line

_WATCHED = 4
"""Samples, one of which is read each time."""
_GRACE_S, _SHARE = 0.1, 0.01
"""Seconds for reading them again, and the share of the run's time that may be added."""
_BUSY_S = 0.05
"""For a sample that is being read by others."""


class SampleWatch:
    """Compares samples with what they were before the script's first turn."""

    def __init__(self, source: SampleSource) -> None:
        """Read them, unless they arrive while the run trains, or follow from a step that readers tell."""
        self._source, self._began_s, self._spent_s = source, time.monotonic(), 0.0
        self._known: dict[int, int] = {}
        if source.order_length and not source.waits and not source.setters:
            for position in range(min(_WATCHED, source.order_length)):
                if self._may_read():
                    self._known.update(self._read(position))
        self._next = 0

    def check(self, where: FrameType | None) -> None:
        """Read one of them again, if there is time.

        Args:
            where: the frame of the script that had control.

        Raises:
            UsageError: it is another one.
        """
        if not self._known or not self._may_read():
            return
        position = list(self._known)[self._next % len(self._known)]
        self._next += 1
        for digest in self._read(position).values():
            if not is_same_sample(digest, self._known[position]):
                [index] = self._source.indices([position])
                raise UsageError(
                    f"while trainer.steps(n) was running, dataset[{index}] became another sample{at_line('', where)}: "
                    "the script changes something that dataset[i] or collate= reads, such as a file, a database, "
                    f"shared memory, or an event or a queue of multiprocessing. {DATASET.way_out}"
                )

    def _may_read(self) -> bool:
        return self._spent_s <= _GRACE_S + _SHARE * (time.monotonic() - self._began_s)

    def _read(self, position: int) -> dict[int, int]:
        """The sample's digest, by its position; nothing if it cannot be read now, of which its step will tell."""
        begin_s = time.monotonic()
        if not generator_lock.acquire(timeout=_BUSY_S):
            return {}
        try:
            with suppress(Exception):
                return {position: self._source.micro_batch([position]).digests[0]}
            return {}
        finally:
            generator_lock.release()
            self._spent_s += time.monotonic() - begin_s
