"""The history of a run, for pages that are opened at any time: bounded in memory, and every change has a number."""

import math
import secrets
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from varuna.core.times import RankTimes
from varuna.fleet.machine.budget import Used
from varuna.fleet.page.costs import Bill, Meter, shown, shown_budget
from varuna.fleet.page.pace import StepPace
from varuna.fleet.page.step_history import StepHistory, row
from varuna.fleet.page.story import Mark, sentence_of
from varuna.fleet.run_folder.past_events import PastStep, events_and_steps, used_before
from varuna.fleet.state.account import Account
from varuna.fleet.state.run_events import (
    Budgeted,
    CheckpointCommitted,
    GenerationRecord,
    GenerationStarted,
    GenerationTimed,
    Morphed,
    Priced,
    RunEnded,
    RunEvent,
    StepRecorded,
    TrainingEnded,
    WaitsSplit,
    WorkerLost,
)

MOST_MARKS = 600
MOST_BUCKETS = 600


@dataclass(slots=True)
class MarkBucket:
    """Sentences of about the same time."""

    began_s: float
    ended_s: float
    step: int | None
    """Newest step at the end of it."""
    counts: Counter[str] = field(default_factory=Counter)
    """By kind."""

    def add_mark(self, mark: Mark) -> None:
        """Note the next sentence."""
        self.ended_s = max(self.ended_s, mark.time_s)
        self.step = self.step if mark.step is None else mark.step
        self.counts[mark.kind] += 1

    def add(self, other: "MarkBucket") -> None:
        """Note the sentences after these."""
        self.ended_s = max(self.ended_s, other.ended_s)
        self.step = self.step if other.step is None else other.step
        self.counts += other.counts


class MarkHistory:
    """Sentences of a whole run.

    Args:
        most: newest ones that are kept one by one.
        most_buckets: of older ones; when there are more, each bucket gets twice as long.
    """

    def __init__(self, most: int = MOST_MARKS, most_buckets: int = MOST_BUCKETS) -> None:
        self._newest: deque[Mark] = deque()
        self._most, self._most_buckets = most, most_buckets
        self._older: list[MarkBucket] = []
        self.width_s = 1.0
        """Of a bucket."""

    def add_mark(self, mark: Mark) -> None:
        """Note a sentence."""
        self._newest.append(mark)
        if len(self._newest) <= self._most:
            return
        old = self._newest.popleft()
        if not self._older or not self._belongs(self._older[-1], old.time_s):
            self._older.append(MarkBucket(old.time_s, old.time_s, old.step))
        self._older[-1].add_mark(old)
        while len(self._older) > self._most_buckets:
            self._widen()

    def _belongs(self, bucket: MarkBucket, time_s: float) -> bool:
        """A clock that was set back begins no new bucket."""
        return time_s // self.width_s <= bucket.began_s // self.width_s

    def _widen(self) -> None:
        self.width_s *= 2
        wide: list[MarkBucket] = []
        for bucket in self._older:
            if wide and self._belongs(wide[-1], bucket.began_s):
                wide[-1].add(bucket)
            else:
                wide.append(bucket)
        self._older = wide

    def newest(self, most: int = MOST_MARKS) -> list[dict[str, object]]:
        """The newest sentences, the oldest of them first."""
        return [mark._asdict() for mark in list(self._newest)[-most:]]

    def older(self) -> dict[str, object]:
        """Return the marks before the newest ones, for a page: buckets as rows of begin, end, step and counts."""
        rows = [[round(each.began_s, 2), round(each.ended_s, 2), each.step, dict(each.counts)] for each in self._older]
        return {"width_s": self.width_s, "rows": rows}


_MOST_BANDS = 1000
_CHANGES_KEPT = 4096
_NEWEST_MARKS = 20
_FAILURES_KEPT = 20
_CURVE = 16
"""Points of a curve that is one line high."""


class Waits:
    """Sums over the steps of the newest generation of which ranks have told."""

    def __init__(self) -> None:
        self._newest: WaitsSplit | None = None
        self._looks = 0
        self._transfer_s: list[float] = []
        self._idle_s: list[float] = []
        self._uncertain_s = 0.0

    def add_split(self, split: WaitsSplit) -> None:
        """Add one more step; of an older generation nothing counts any more."""
        if self._newest is None or split.generation > self._newest.generation:
            self._looks, self._uncertain_s = 0, 0.0
            self._transfer_s, self._idle_s = [0.0] * len(split.transfer_s), [0.0] * len(split.idle_s)
        elif split.generation < self._newest.generation:
            return
        self._newest, self._looks = split, self._looks + 1
        self._uncertain_s = max(self._uncertain_s, split.uncertain_s)
        for stage, (transfer_s, idle_s) in enumerate(zip(split.transfer_s, split.idle_s, strict=True)):
            self._transfer_s[stage] += transfer_s
            self._idle_s[stage] += idle_s

    def describe(self) -> dict[str, object] | None:
        """As plain values: of each stage's waits, the share in which the message was on its way; None before a look."""
        if self._newest is None:
            return None
        pairs = zip(self._transfer_s, self._idle_s, strict=True)
        return {
            "generation": self._newest.generation,
            "step": self._newest.step,
            "looks": self._looks,
            "uncertain_s": self._uncertain_s,
            "transfer_share": [round(transfer_s / (transfer_s + idle_s or 1.0), 4) for transfer_s, idle_s in pairs],
        }


class PageChange(NamedTuple):
    """Something new: what kind of thing, and what a page needs of it."""

    number: int
    kind: str
    value: object


class Chronicle:
    """The whole run: steps, plans, and what a person should read. Any thread may call it.

    Args:
        most_bands: generations that are kept one by one; of older ones each two become one.
        changes_kept: newest changes; a page that missed more starts afresh.
    """

    def __init__(self, most_bands: int = _MOST_BANDS, changes_kept: int = _CHANGES_KEPT) -> None:
        self.life = secrets.token_hex(4)
        """Numbers of changes mean nothing to another manager."""
        self._lock = threading.Lock()
        self._steps, self._pace, self._meter = StepHistory(), StepPace(), Meter()
        self._bands: list[dict[str, object]] = []
        self._most_bands = most_bands
        self._marks = MarkHistory()
        self._timed: dict[str, object] | None = None
        self._waits = Waits()
        self._checkpoint: dict[str, object] | None = None
        self._ended: dict[str, object] | None = None
        self._newest: PastStep | None = None
        self.failures: list[dict[str, str]] = []
        """Worker and cause, the first one first."""
        self._lost_workers = 0
        self.record: GenerationRecord | None = None
        """The newest generation."""
        self.newest_s = 0.0
        """Time of the newest event, in seconds since 1970."""
        self._began_s: float | None = None
        self._number = 0
        self._changes: deque[PageChange] = deque(maxlen=changes_kept)

    def carry(self, before: Account) -> None:
        """Before any event: what the run had used up when it started again."""
        with self._lock:
            self._meter = Meter(before)

    def add_event(self, event: RunEvent, time_s: float) -> None:
        """Note an event; ``time_s`` in seconds since 1970."""
        with self._lock:
            self._began_s = time_s if self._began_s is None else self._began_s
            self.newest_s = time_s
            self._meter.add_event(event, time_s)
            self._note_failure(event)
            if isinstance(event, StepRecorded):
                self._step(PastStep(event.step, time_s, event.loss, event.examples_per_s))
                return
            match event:
                case GenerationStarted(record=record) | Morphed(record=record):
                    self._band(record, time_s)
                    if isinstance(event, GenerationStarted):
                        self.record = record
                        self._pace.begin_generation()
                        if record.generation == record.began and record.first_step:
                            self._checkpoint = {"step": record.first_step, "time_s": round(time_s, 2), "resumed": True}
                            self._note("checkpoint", self._checkpoint)
                case TrainingEnded():
                    self._begin_training()
                case GenerationTimed():
                    self._timed = timed(event)
                    self._note("timed", self._timed)
                case WaitsSplit():
                    self._waits.add_split(event)
                    self._note("waits", self._waits.describe())
                case CheckpointCommitted(step=step):
                    self._checkpoint = {"step": step, "time_s": round(time_s, 2)}
                    self._note("checkpoint", self._checkpoint)
                case RunEnded(exit_code=exit_code, text=text, worker=worker):
                    self._ended = {"exit_code": exit_code, "text": text, "worker": worker, "time_s": round(time_s, 2)}
                    self._note("ended", self._ended)
                case _:
                    pass
            if (mark := sentence_of(event, time_s, None if self._newest is None else self._newest.step)) is not None:
                self._marks.add_mark(mark)
                self._note("mark", mark._asdict())

    def _note_failure(self, event: RunEvent) -> None:
        self._lost_workers += isinstance(event, WorkerLost)
        match event:
            case WorkerLost(worker=worker, cause=cause) | RunEnded(worker=str() as worker, text=cause):
                self.failures = [*self.failures, {"worker": worker, "cause": cause}][:_FAILURES_KEPT]
            case _:
                pass

    def _begin_training(self) -> None:
        """Curves begin anew; what is told in words, and the cost, is of the whole run."""
        self._steps, self._pace, self._newest = StepHistory(), StepPace(), None
        self._timed, self._checkpoint = None, None
        self._waits = Waits()
        self._changes.clear()  # an open page starts afresh
        self._number += 1

    def read(self, run_dir: Path) -> None:
        """Note all that a run's journal has.

        Raises:
            UsageError: there is no run, or it is another version's.
        """
        self.carry(used_before(run_dir))
        for time_s, event in events_and_steps(run_dir):
            if isinstance(event, PastStep):
                self.take_step(event)
            else:
                self.add_event(event, time_s)

    def take_step(self, point: PastStep) -> None:
        """Note a committed step, as the journal has it."""
        with self._lock:
            self._step(point)

    def _step(self, point: PastStep) -> None:
        self._newest, self.newest_s = point, point.time_s
        self._steps.add_point(point)
        self._pace.add_step(point.step, point.time_s)
        self._meter.take_step(point)
        self._note("step", row(point))

    def _band(self, record: GenerationRecord, time_s: float) -> None:
        made = band(record, time_s)
        if self._bands and self._bands[-1]["generation"] == record.generation:
            made["time_s"] = self._bands[-1]["time_s"]  # the morph is over: it began earlier
            self._bands[-1] = made
        else:
            self._bands.append(made)
        if len(self._bands) > self._most_bands:
            self._bands = thinned(self._bands)
        self._note("band", made)

    def _note(self, kind: str, value: object) -> None:
        self._number += 1
        self._changes.append(PageChange(self._number, kind, value))

    def describe(self) -> tuple[int, dict[str, object]]:
        """The number of the newest change, and everything as plain values."""
        with self._lock:
            return self._number, {
                "steps": self._steps.describe(),
                "bands": list(self._bands),
                "marks": self._marks.newest(),
                "older": self._marks.older(),
                "timed": self._timed,
                "waits": self._waits.describe(),
                "checkpoint": self._checkpoint,
                "ended": self._ended,
            }

    def newest(self, total: int, now_s: float) -> dict[str, object]:
        """Return what fits on a screen: the newest step, the last sentences, a curve, times, and what is reckoned."""
        with self._lock:
            last = self._newest
            return {
                "step": None if last is None else last.step,
                "loss": last.loss if last is not None and math.isfinite(last.loss) else None,
                "examples_per_s": 0.0 if last is None else last.examples_per_s,
                "marks": self._marks.newest(_NEWEST_MARKS),
                "curve": self._steps.curve(_CURVE),
                "timed": self._timed,
                "waits": self._waits.describe(),
                "checkpoint": self._checkpoint,
                "began_s": self._began_s,
                **self._reckoned(total, now_s),
            }

    def reckoned(self, total: int, now_s: float) -> dict[str, object]:
        """Count losses, and reckon what is left of ``total`` steps, and the cost until ``now_s`` (since 1970)."""
        with self._lock:
            return self._reckoned(total, now_s)

    def _reckoned(self, total: int, now_s: float) -> dict[str, object]:
        left_s = self._pace.left_s(total) if self._ended is None else None
        used, is_over = self._meter.used(now_s), self._ended is not None
        return {
            "failures": self.failures,
            "lost_workers": self._lost_workers,
            "left_s": None if left_s is None else round(left_s, 1),
            "cost": shown(self._meter.cost(now_s)),
            "budget": shown_budget(self._meter.budget, used, is_over=is_over),
        }

    def cost(self, now_s: float) -> Bill | None:
        """Until now, in seconds since 1970; None where nobody gave a price."""
        with self._lock:
            return self._meter.cost(now_s)

    def used(self, now_s: float, price: Priced | None = None) -> Used:
        """Until now, in seconds since 1970, by all starts of the run; hours without a price count at ``price``."""
        with self._lock:
            return self._meter.used(now_s, price)

    def account(self, now_s: float) -> Account:
        """The same, for the next start of the run."""
        with self._lock:
            return self._meter.account(now_s)

    @property
    def exit_code(self) -> int | None:
        """With which the run ended; None if it has not."""
        return None if self._ended is None else int(str(self._ended["exit_code"]))

    @property
    def budget(self) -> Budgeted | None:
        """Limits on what the run may use up; None: nobody has said."""
        return self._meter.budget

    @property
    def price(self) -> Priced | None:
        """Price of a worker; None if nobody said."""
        return self._meter.price

    def since(self, number: int) -> list[PageChange] | None:
        """Changes after the one with this number; None if some of them are not kept any more, or never were."""
        with self._lock:
            if not 0 <= number <= self._number:
                return None
            missed = self._number - number
            if missed > len(self._changes):
                return None
            return list(self._changes)[len(self._changes) - missed :]


def band(record: GenerationRecord, time_s: float) -> dict[str, object]:
    """A generation for a page."""
    return {
        "generation": record.generation,
        "time_s": round(time_s, 2),
        "step": record.first_step,
        "stages": record.plan.stages,
        "replicas": record.plan.replicas,
        "shape": record.plan.shape,
        "recovery_s": None if record.recovery_seconds is None else round(record.recovery_seconds, 3),
        "redone": record.steps_redone,
    }


def thinned(bands: list[dict[str, object]]) -> list[dict[str, object]]:
    """Of the older half each two become one: the plan that ran longer, from the beginning of the first."""
    half = len(bands) // 4 * 2
    kept: list[dict[str, object]] = []
    for index in range(0, half, 2):
        first, second, after = bands[index], bands[index + 1], bands[index + 2]
        first_s, second_s, after_s = (float(str(each["time_s"])) for each in (first, second, after))
        longer = first if second_s - first_s >= after_s - second_s else second
        kept.append({**longer, "time_s": first["time_s"], "step": first["step"], "generation": first["generation"]})
    return [*kept, *bands[half:]]


def timed(event: GenerationTimed) -> dict[str, object]:
    """Describe the times of a generation's steps, for a page: seconds of a step, by stage."""
    return {
        "generation": event.generation,
        "predicted_s": event.predicted_s,
        "is_nominal": event.is_nominal,
        "predicted": None if event.predicted is None else event.predicted.model_dump(),
        "stages": [parts(stage) for stage in event.stages],
        "relayed": [stage.relayed for stage in event.stages],
    }


def parts(times: RankTimes) -> dict[str, float]:
    """Seconds of a step of one stage, and its bytes; waits are for messages, samples and other stages alike."""
    return {
        "step_s": times.step_s,
        "compute_s": times.compute_s,
        "waited_s": times.waited_s,
        "reduced_s": times.reduced_s,
        "ending_s": times.ending_s,
        "compressed_bytes": times.compressed.size_bytes / times.steps,
        "sent_bytes": times.compressed.sent_bytes / times.steps,
    }
