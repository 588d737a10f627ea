"""Reads in the loader's thread, and in processes once training turns out to wait for samples.

Every few seconds it is known how long a micro-batch takes to read, how long training waits for it, and how many
processors are idle. If processes would help, a spare process forks them; each reads what the thread has just read, and
only if all bits agree do they go on. Whatever goes wrong in one of them, the thread reads that micro-batch again, and
all others from then on. So no sample, no order and no error depends on who reads.
"""

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from varuna.core.errors import DataError
from varuna.data.digests import tensors_digest
from varuna.data.handles import unshareable
from varuna.data.micro_batch import MicroBatch
from varuna.data.pace import Pace
from varuna.data.reader_process import Read, ReadTime
from varuna.data.readers import CAN_FORK, Reader, SampleRequest
from varuna.data.spare import Spare
from varuna.process.console import say, say_once

WHILE_S, LONG_S = 2.0, 10.0
"""Reading is looked at after so long, if there were several micro-batches, and after so long in any case."""
SEVERAL, FEW = 8, 3
"""Micro-batches that are several, and that are after a long time."""
QUICK_S = 0.0005
"""A sample that takes less needs no process: sending it would take as long."""
_ANSWER_S, _TIMES = 30.0, 20
"""A reader has so long for a micro-batch, or so many times as long as the thread."""
_DETAILS = "docs/data.md#slow-samples"


class MeasuredReading:
    """How samples are read if nobody said ``num_workers=``; for one loader at a time."""

    def __init__(self, read: Read, held: Sequence[object], *, forks: bool, at_once: int = 0) -> None:
        """Read in the thread that fetches.

        Args:
            read: reads a micro-batch.
            held: what reading uses: the dataset, and ``collate``.
            forks: keep a spare process for readers; to be called before samples are read.
            at_once: processes that another dataset of the job turned out to need; 0: none, or nobody knows.
        """
        self.in_use = threading.Lock()
        """held by the loader that uses this"""
        self._read, self._held, self._at_once = read, held, at_once
        self._spare = Spare(read) if forks and CAN_FORK and sys.platform == "linux" else None
        self._asked: deque[SampleRequest] = deque()
        self._idle: deque[Reader] = deque()
        self._busy: deque[Reader] = deque()
        self._watch: ReadingWatch | None = None
        self._waited_s = 0.0
        self._longest_s = 0.0
        """that reading a micro-batch has taken"""
        self._thread_period_s = math.inf
        """of a micro-batch while the thread read and training waited for it"""
        self._settled = False
        """nothing more is to be decided"""

    @property
    def count(self) -> int:
        """Micro-batches that are read at the same time."""
        return max(1, self.processes)

    @property
    def processes(self) -> int:
        """That read now; 0: the thread does."""
        return len(self._idle) + len(self._busy)

    @property
    def has_idle(self) -> bool:
        """Something can be read that is not being read yet."""
        return bool(self._idle) if self.processes else not self._asked

    def waited(self, seconds: float) -> None:
        """Training has waited for samples; called by its thread."""
        self._waited_s += seconds

    def ask(self, ask: SampleRequest) -> None:
        """Have this read, by an idle process or by ``fetch``."""
        self._asked.append(ask)
        if self._idle:
            reader = self._idle.popleft()
            self._busy.append(reader)
            try:
                reader.ask(ask)
            except DataError as error:
                self._back_to_thread(str(error))

    def fetch(self) -> MicroBatch | BaseException:
        """Take the micro-batch that was asked for first.

        Raises:
            BaseException: whatever the dataset or ``collate`` raises.
        """
        ask = self._asked.popleft()
        batch, took = self._by_reader(ask) if self._busy else self._here(ask)
        if not self._settled:
            self._look(ask, batch, took)
        return batch

    def forget(self) -> None:
        """What was asked for is not fetched any more."""
        self._asked.clear()
        self._idle.extend(self._busy)
        self._busy.clear()
        self._watch = None

    def close(self) -> None:
        """End the processes, if there are any."""
        self._settled = True
        self._end()

    # -- reading ------------------------------------------------------------------------------------------

    def _here(self, ask: SampleRequest) -> tuple[MicroBatch, ReadTime]:
        begin_s, used_s = time.monotonic(), time.thread_time()
        batch = self._read(ask.positions, ask.keys, compared=ask.compared)
        return batch, ReadTime(time.monotonic() - begin_s, time.thread_time() - used_s)

    def _by_reader(self, ask: SampleRequest) -> tuple[MicroBatch, ReadTime]:
        reader = self._busy.popleft()
        self._idle.append(reader)
        try:
            found = reader.fetch(self._bound_s)
        except DataError as error:
            self._back_to_thread(str(error))
            return self._here(ask)
        if isinstance(found, MicroBatch):
            return found, reader.took
        batch = self._here(ask)  # raises the same, unless the process is to blame
        self._back_to_thread(f"{reader.name} could not read what the thread could ({type(found).__name__}: {found})")
        return batch

    @property
    def _bound_s(self) -> float:
        return max(_ANSWER_S, _TIMES * self._longest_s)

    def _back_to_thread(self, why: str) -> None:
        if self._spare is not None:
            say(f"{why}; from now on a thread reads samples. num_workers=0 does so from the start")
        self._settled = True
        self._end()

    def _end(self) -> None:
        for reader in (*self._idle, *self._busy):
            reader.link.close()
        self._idle.clear()
        self._busy.clear()
        self._let_spare_go()

    def _let_spare_go(self) -> None:
        """It keeps memory that this process frees."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    # -- deciding -----------------------------------------------------------------------------------------

    def _look(self, ask: SampleRequest, batch: MicroBatch, took: ReadTime) -> None:
        """Count a micro-batch that was read; every now and then, decide."""
        self._longest_s = max(self._longest_s, took.seconds)
        at_once, self._at_once = self._at_once, 0
        if not self.processes and took.seconds < QUICK_S * len(ask.positions):
            if self._watch is None:
                self._let_spare_go()
        elif at_once and self._why_not() is None:
            self._start(at_once, ask, batch, "")
        if self._watch is None:
            self._watch = ReadingWatch(self._waited_s)
            return
        self._watch.count(took)
        if not self._watch.is_over:
            return
        pace, self._watch = self._watch.pace(self._waited_s), ReadingWatch(self._waited_s)
        self._decide(pace, ask, batch)

    def _decide(self, pace: Pace, ask: SampleRequest, batch: MicroBatch) -> None:
        had = self.processes
        if had and pace.period_s > self._thread_period_s:
            self._back_to_thread(f"{had} processes read samples no faster than a thread did")
            return
        if not pace.is_slow:
            if pace.read_s < QUICK_S * len(ask.positions):  # only the first was slow: it imported, or opened files
                self._let_spare_go()
            return
        wanted = pace.wanted
        if had:
            self._settled = wanted <= had  # there is nothing more to gain
            if not self._settled:
                self._start(wanted - had, ask, batch, f"{pace}: {wanted} processes read them from now on")
            return
        self._thread_period_s = pace.period_s
        if not wanted:
            say_once(
                f"{pace}, and no processor is free: processes that read would not help. Make dataset[i] cheaper "
                "(decode or tokenise once, and keep the result), or use machines with more cores"
            )
            self.close()
            return
        advice = f"num_workers={wanted} would make a micro-batch about {pace.gain:.1f} times as fast"
        why_not = self._why_not()
        if why_not is not None:
            say_once(f"{pace}. {advice}, but {why_not}: see {_DETAILS}")
            self.close()
            return
        self._start(
            wanted,
            ask,
            batch,
            f"{pace}: {wanted} processes read them from now on. num_workers={wanted} does so from the start, "
            "num_workers=0 never does",
        )

    def _why_not(self) -> str | None:
        """Why processes are not started unasked."""
        if self._spare is None:
            return "they must be there from the start"
        if (moved := self._spare.moved) is not None:
            return f"{moved} was open before and is read by place, which processes would share"
        if (found := unshareable(self._held)) is not None:
            return f"the dataset or collate= holds {found}, which processes may not be able to share"
        return None

    def _start(self, count: int, ask: SampleRequest, batch: MicroBatch, text: str) -> None:
        """Have readers forked; each must read what was read last, bit by bit."""
        assert self._spare is not None
        readers: list[Reader] = []
        try:
            readers += [self._spare.reader() for _ in range(count)]
            for reader in readers:
                reader.ask(ask)
            for reader in readers:
                found = reader.fetch(self._bound_s)
                if isinstance(found, BaseException):
                    raise DataError(f"{reader.name} cannot read samples ({type(found).__name__}: {found})")
                if _digest(found) != _digest(batch):
                    raise DataError(f"{reader.name} reads other values than the thread does")
        except DataError as error:
            for reader in readers:
                reader.link.close()
            self._back_to_thread(str(error))
            return
        self._idle.extend(readers)
        if text:
            say_once(text)


def _digest(batch: MicroBatch) -> tuple[tuple[int, ...], int]:
    return batch.indices, tensors_digest(batch.tensors)


class ReadingWatch:
    """What is seen of reading from one micro-batch on.

    Args:
        waited_s: that training has waited for samples so far, in all.
    """

    def __init__(self, waited_s: float) -> None:
        self._begin_s, self._idle_s, self._waited_s = time.monotonic(), _idle_s(), waited_s
        self._count, self._read_s, self._read_cpu_s = 0, 0.0, 0.0

    def count(self, took: ReadTime) -> None:
        """A micro-batch was read."""
        self._count += 1
        self._read_s += took.seconds
        self._read_cpu_s += took.processor_s

    @property
    def is_over(self) -> bool:
        """Enough was seen to decide."""
        seconds = time.monotonic() - self._begin_s
        return self._count >= (SEVERAL if seconds < LONG_S else FEW) and seconds >= WHILE_S

    def pace(self, waited_s: float) -> Pace:
        """What was seen, per micro-batch.

        Args:
            waited_s: that training has waited for samples so far, in all.
        """
        seconds, count = time.monotonic() - self._begin_s, self._count
        return Pace(
            period_s=seconds / count,
            waited_s=(waited_s - self._waited_s) / count,
            read_s=self._read_s / count,
            read_cpu_s=self._read_cpu_s / count,
            free_processors=(_idle_s() - self._idle_s) / seconds,
        )


def _idle_s() -> float:
    """Seconds that the machine's processors have had nothing to do, all together; 0 where nobody counts."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
