"""A dataset that grows: what is read at a position is decided when its step is near, once and for all."""

import os
import time
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from varuna.core.errors import DataError, UsageError
from varuna.data.samples import LOOKED_AT
from varuna.extras.rollouts.log import Log
from varuna.extras.rollouts.order import Row, StepOrder, usable, versions
from varuna.process.console import say

_TOLD_S = 30.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CACHED = 32
"""Objects that are kept: neighbouring samples are of the same."""
_MOST_AHEAD = 100
"""Steps that are read at once; a larger gap is no reading ahead."""


class Rollouts:
    """Samples that others append to a log while the run trains, each used once.

    ``dataset[position]`` may wait. The first worker that needs a step decides which samples it uses, and writes that
    down in the log; all others read it there, now and in every resume, morph and replay.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        batch: int,
        staleness: int,
        wait_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the log; nothing is read yet.

        Args:
            place: a folder that all machines share, or a URL of S3, Google Cloud Storage or Azure Blob; of one run.
            batch: the run's global batch.
            staleness: most steps between the version of a sample and the step that uses it.
            wait_s: bound on a wait in which nothing comes that the step may use.
            clock: seconds.
            sleep: waits.

        Raises:
            UsageError: one of them is out of range, or the place is of an unknown kind.
        """
        if batch < 1 or staleness < 0 or not wait_s > 0:
            raise UsageError(
                f"Rollouts(batch={batch}, staleness={staleness}, wait_s={wait_s}): batch must be the trainer's "
                "global_batch, staleness 0 steps or more, wait_s above 0"
            )
        if (least := -(-LOOKED_AT // batch) - 1) > staleness:
            raise UsageError(
                f"staleness={staleness} is too little for batch={batch}: before step 0 the first {LOOKED_AT} samples "
                f"are looked at, which are those of steps 0 to {least}, and there is no version but 0. Give "
                f"staleness={least} or more"
            )
        self._log, self._batch, self._staleness, self._wait_s = Log(place), batch, staleness, wait_s
        self._clock, self._sleep = clock, sleep
        self._orders: dict[int, StepOrder] = {}
        self._read = lru_cache(maxsize=_CACHED)(self._log.samples)
        self._step: int | None = None

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """Return the sample at a position of the run; wait until it is decided on.

        Raises:
            DataError: see ``wait_for``; or what was decided on is gone or damaged.
        """
        step, place = divmod(position, self._batch)
        if self._step not in (None, step):
            raise DataError(
                f"Rollouts(batch={self._batch}) needs the trainer's global_batch, and no batch_ramp: position "
                f"{position} is of step {self._step}"
            )
        self.wait_for(position)
        name, row = self._decided(step).samples[place]
        return {key: value[row] for key, value in self._read(name).items()}

    def order(self, step: int) -> StepOrder | None:
        """Return the samples of a step, if they are decided on.

        Raises:
            DataError: what was written down is damaged, or of another batch.
        """
        if step not in self._orders:
            found = self._log.order(step)
            if found is None:
                return None
            if len(found.samples) != self._batch:
                raise DataError(
                    f"{self._log.place} has the order of a run with {len(found.samples)} samples a step, but this one "
                    f"has batch={self._batch}. Give each run a place of its own"
                )
            self._orders[step] = found
        return self._orders[step]

    # -- called by Varuna ---------------------------------------------------------------------------------

    def set_step(self, step: int) -> None:
        """Note the step of the position that is read next."""
        self._step = step

    def wait_for(self, position: int) -> None:
        """Wait until it is decided which sample is at a position, or decide it.

        Raises:
            DataError: nothing that could be used has come for long, or the log is that of another run.
        """
        step = decided = position // self._batch
        while self.order(decided) is None and decided > 0:
            decided -= 1
            if decided < step - _MOST_AHEAD:
                raise DataError(
                    f"step {step} follows steps whose samples are not in {self._log.place}: give Rollouts the place "
                    "that this run has used from its beginning, or begin a new run"
                )
        for each in range(decided, step + 1):
            self._settle(each)

    def _settle(self, step: int) -> None:
        """Wait until the order of a step is written down, by this worker or another one."""
        since_s, seen, pause_s, has_told = self._clock(), 0, _PAUSE_S, False
        while self.order(step) is None:
            first = versions(step, self._staleness).start - 1
            used = {row for before in range(max(0, first), step) for row in self._decided(before).samples}
            left = usable(step, self._staleness, self._log.appended(range(max(0, first), step + 1)), used)
            if len(left.rows) >= self._batch:
                self._log.decide(step, StepOrder(samples=left.rows[: self._batch], skipped=left.skipped))
                continue
            if len(left.rows) > seen:
                seen, since_s = len(left.rows), self._clock()
            waited_s = self._clock() - since_s
            if waited_s >= self._wait_s:
                raise DataError(f"{self._lacking(step, left.rows)}, and nothing came for {waited_s:.0f} s. {_ADVICE}")
            if waited_s >= _TOLD_S and not has_told:
                say(f"{self._lacking(step, left.rows)}: waiting for more")
                has_told = True
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        for old in [each for each in self._orders if each < step - 2 * (self._staleness + 1) - _MOST_AHEAD]:
            self._orders.pop(old, None)

    def _decided(self, step: int) -> StepOrder:
        if (found := self.order(step)) is None:
            raise DataError(f"the order of step {step} was there, and is gone from {self._log.place}. Put it back")
        return found

    def _lacking(self, step: int, found: tuple[Row, ...]) -> str:
        fresh = versions(step, self._staleness)
        newest = self._log.newest()
        return (
            f"step {step} needs {self._batch} samples of versions {fresh.start} to {fresh.stop - 1}, and "
            f"{self._log.place} has {len(found)} that are not used (newest version: "
            f"{'none' if newest is None else newest})"
        )


_ADVICE = (
    "Do the processes that append still run, and do they take up new versions? If staleness= is below the steps "
    "between publications, none may come in time: raise it, or publish more often. If this run goes on from a "
    "checkpoint, give it the place that it used before. Then start the same command again to resume."
)
