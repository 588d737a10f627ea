"""The manager's desk for what people want to see of a run's steps: it asks the workers, and keeps what they tell."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from varuna.core.clock_alignment import Alignment, align, receiver_of
from varuna.core.messages import PROFILE_STEPS, ProfileSteps, Shown, ShowStep, StepShown, ToWorker
from varuna.core.times import Interval, RankTimeline, StepTimeline
from varuna.fleet.page.step_sheet import DeskAnswer, refusal
from varuna.fleet.run_folder.timelines import kept_steps, read_timeline, write_timeline
from varuna.fleet.state.run_events import (
    GenerationRecord,
    GenerationStarted,
    RunEvent,
    StepRecorded,
    TrainingEnded,
    WaitsSplit,
    WorkerLost,
)
from varuna.process.background_work import BackgroundWork


class WaitSplit(NamedTuple):
    """The waits of a step's stages, as means over the replicas."""

    transfer_s: tuple[float, ...]
    """By stage: while the message was on its way."""
    idle_s: tuple[float, ...]
    """By stage: for any other reason."""
    uncertain_s: float
    """Seconds by which a clock, and so the begin of a transfer, may be off; 0 where all ranks share one."""


def split_waits(timeline: StepTimeline) -> WaitSplit | None:
    """Split a step's waits into transfer and idle; None if a rank is missing or clocks cannot be brought together."""
    plan, alignment = timeline.plan, align(timeline)
    if len(timeline.ranks) < plan.workers or not math.isfinite(alignment.uncertain_s):
        return None
    made_s = _made(timeline, alignment)
    transfer_s, idle_s, alike = [0.0] * plan.stages, [0.0] * plan.stages, plan.kinds[0][0]
    for rank in timeline.ranks:
        replica, stage = plan.place_of(rank.rank)
        if replica not in alike:
            continue
        moved_s, waited_s = _waits(rank, made_s, rank.zero_s + alignment.added_s[rank.clock])
        transfer_s[stage] += moved_s / len(alike)
        idle_s[stage] += (waited_s - moved_s) / len(alike)
    return WaitSplit(tuple(transfer_s), tuple(idle_s), alignment.uncertain_s)


_Key = tuple[int, str, int]
"""Rank that gets a message, its kind, and its micro-batch."""


def _made(timeline: StepTimeline, alignment: Alignment) -> dict[_Key, float]:
    """Return when each message was handed to its transport, by the aligned clock."""
    found: dict[_Key, float] = {}
    for rank in timeline.ranks:
        add_s = rank.zero_s + alignment.added_s[rank.clock]
        for sent in rank.sent:
            found[receiver_of(timeline.plan, rank.rank, sent.kind), sent.kind, sent.micro_batch] = sent.begin_s + add_s
    return found


def _waits(rank: RankTimeline, made_s: dict[_Key, float], add_s: float) -> tuple[float, float]:
    """Seconds of a rank's waits in which a message was on its way, and of all its waits."""
    moved_s = waited_s = 0.0
    order = _Order(rank.actions, rank.came)
    for wait in rank.waits:
        waited_s += wait.seconds
        came = order.needed_after(wait)
        made = None if came is None else made_s.get((rank.rank, came.kind, came.micro_batch))
        if came is not None and made is not None:
            moved_s += max(0.0, min(wait.end_s, came.end_s) - max(wait.begin_s, made - add_s))
    return moved_s, waited_s


class _Order:
    """The messages for which a stage waited: each is that of the next action which needs one."""

    def __init__(self, actions: Sequence[Interval], came: Sequence[Interval]) -> None:
        self._actions, self._at = actions, 0
        self._came = {(each.kind, each.micro_batch): each for each in came}

    def needed_after(self, wait: Interval) -> Interval | None:
        """Find a wait's message, asked for in order. A recomputation is begun for the backward pass that follows it."""
        while self._at < len(self._actions) and self._actions[self._at].begin_s < wait.begin_s:
            self._at += 1
        following = self._actions[self._at] if self._at < len(self._actions) else None
        if following is None or following.kind == "W":
            return None
        return self._came.get(("activation" if following.kind == "F" else "gradient", following.micro_batch))


_LATE_S = 10.0
"""After the first worker has told of a step, the others have so long."""
_CLOSE_S = 5.0
_MOST_WANTED, _MOST_PROFILES = 16, 8
_TYPICAL = 4
"""This step of each generation is kept: by then caches are warm."""
_MOST_ROWS = 100_000
"""Actions of a step over all ranks; of larger steps only those that somebody asks for are kept."""
_LOOK_S, _LOOK_ROWS = 60.0, 25_000
"""So often one more step is looked at, to learn what waits are for, unless steps are larger than that."""
_LOOK_AHEAD = 2
"""Steps until the one that is looked at: workers have heard of it by then."""


@dataclass
class _Gathering:
    """Timelines of one step that workers have told."""

    asked: set[str] = field(default_factory=set)
    told: dict[str, RankTimeline | None] = field(default_factory=dict)
    first_s: float | None = None
    """time at which the first timeline came"""
    keeps: bool = True
    """whether it is written down; else it is only looked at"""


@dataclass
class _Profile:
    """The pieces of one worker's profile."""

    worker: str
    request: ProfileSteps
    parts: dict[int, bytes] = field(default_factory=dict)
    count: int = 0
    failure: str | None = None


class StepRecorder:
    """Any thread may ask; the manager's tells what happens.

    Args:
        run_dir: timelines are kept there.
        send: reaches a worker.
        steps: how many the run has, once that is known.
        fail: hears of an error that nobody foresaw.
        told: hears what the waits of a step were for, on some thread.
        now_s: the time.
    """

    def __init__(
        self,
        run_dir: Path,
        send: Callable[[str, ToWorker], None],
        *,
        steps: Callable[[], int | None],
        fail: Callable[[BaseException], None],
        told: Callable[[WaitsSplit], object] = lambda split: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._send, self._steps, self._now_s = run_dir, send, steps, now_s
        self._told = told
        self._disk = BackgroundWork("timelines", fail)  # the manager does not wait for it
        self._lock = threading.RLock()
        self._records: dict[int, GenerationRecord] = {}
        self._newest: GenerationRecord | None = None
        self._step = -1
        """the newest that was recorded"""
        self._lost: dict[str, str] = {}
        self._wanted: dict[int, _Gathering] = {}
        self._look, self._looked_s = -1, now_s()
        self._writing: set[int] = set()
        self._unknown: set[int] = set()
        """steps of which no worker knows anything, until somebody has heard that"""
        self._profiles: dict[tuple[int, int], _Profile] = {}
        """by rank and first step"""

    # -- what happens, on the manager's thread ------------------------------------------------------------

    def add_event(self, event: RunEvent, *, is_past: bool = False) -> None:
        """Note an event of the run; one of an earlier manager asks nothing of workers."""
        with self._lock:
            match event:
                case GenerationStarted(record=record):
                    before, self._newest = self._newest, record
                    self._records[record.generation] = record
                    if not is_past:
                        self._begin(record, before)
                case StepRecorded(step=step):
                    self._step = step
                    self._settle()
                    if not is_past:
                        self._look_at(step + _LOOK_AHEAD)
                case TrainingEnded():
                    self._settle(waits=False)
                    self._wanted.clear()
                    self._unknown.clear()
                    self._step = self._look = -1
                case WorkerLost(worker=worker, cause=cause):
                    self._lost[worker] = cause
                    self._settle()
                    for profile in self._profiles.values():
                        whole = profile.count and len(profile.parts) == profile.count
                        if profile.worker == worker and profile.failure is None and not whole:
                            profile.failure = f"its worker is gone: {cause}"

    def add_shown(self, worker: str, shown: Shown) -> None:
        """Add what a worker has told."""
        with self._lock:
            if isinstance(shown, StepShown):
                gathering = self._wanted.get(shown.step)
                if gathering is not None and worker in gathering.asked:
                    gathering.told[worker] = shown.timeline
                    if shown.timeline is not None and gathering.first_s is None:
                        gathering.first_s = self._now_s()
                    self._settle()
            else:
                for profile in self._profiles.values():
                    if profile.worker == worker and profile.request.first == shown.first:
                        profile.failure, profile.count = shown.failure, shown.count
                        profile.parts[shown.number] = shown.data

    def close(self) -> None:
        """Keep what has been told so far; waits for the disk, but not for long."""
        with self._lock:
            self._settle(waits=False)
        self._disk.wait_for(lambda: None, _CLOSE_S)
        self._disk.close()

    def _begin(self, record: GenerationRecord, before: GenerationRecord | None) -> None:
        """Of each generation a typical step is kept, and its last one by the workers that are still there."""
        if _rows(record) <= _MOST_ROWS:
            steps = self._steps() or 0
            for step in (record.first_step + _TYPICAL, steps - 1):
                if record.first_step <= step < steps:
                    self._wanted.setdefault(step, _Gathering())
            if before is not None and not record.rollback and record.first_step > before.first_step:
                survivors = [worker for worker in before.grid if worker not in self._lost]
                if survivors:
                    last = self._wanted.setdefault(record.first_step - 1, _Gathering())
                    self._ask(record.first_step - 1, last, survivors)
        for step, gathering in self._wanted.items():
            if step >= record.first_step:
                self._ask(step, gathering, record.grid)

    def _look_at(self, step: int) -> None:
        """Ask for one more step if the last look was long ago."""
        steps, record = self._steps() or 0, self._newest
        if record is None or self._look in self._wanted or step in self._wanted or step >= steps:
            return
        if self._now_s() >= self._looked_s + _LOOK_S and _rows(record) <= _LOOK_ROWS:
            self._look, self._looked_s = step, self._now_s()
            self._wanted[step] = _Gathering(keeps=False)
            self._ask(step, self._wanted[step], record.grid)

    def _ask(self, step: int, gathering: _Gathering, workers: Iterable[str]) -> None:
        for worker in workers:
            if worker not in gathering.told and worker not in self._lost:
                gathering.asked.add(worker)
                self._send(worker, ShowStep(step=step))

    def _settle(self, *, waits: bool = True) -> None:
        """Write down what is complete, or as complete as it will ever be."""
        for step, gathering in list(self._wanted.items()):
            owed = gathering.asked - gathering.told.keys() - self._lost.keys()
            is_late = gathering.first_s is not None and self._now_s() > gathering.first_s + _LATE_S
            timelines = [timeline for timeline in gathering.told.values() if timeline is not None]
            if not timelines and (owed or not gathering.asked):
                continue
            if owed and waits and not is_late:
                continue
            del self._wanted[step]
            if timelines:
                self._write(self._joined(step, gathering, timelines), keeps=gathering.keeps)
            elif gathering.keeps:
                self._unknown.add(step)

    def _write(self, timeline: StepTimeline, *, keeps: bool) -> None:
        def write() -> None:
            if keeps:
                write_timeline(self._run_dir, timeline)
                with self._lock:
                    self._writing.discard(timeline.step)
            if (split := split_waits(timeline)) is not None:
                told = WaitsSplit(generation=timeline.generation, step=timeline.step, **split._asdict())
                self._told(told)

        if keeps:
            self._writing.add(timeline.step)
        self._disk.do(write)

    def _joined(self, step: int, gathering: _Gathering, timelines: list[RankTimeline]) -> StepTimeline:
        generation = max(timeline.generation for timeline in timelines)  # a step that ran again counts once
        record = self._records[generation]
        ranks = {timeline.rank: timeline for timeline in timelines if timeline.generation == generation}
        missing = {}
        for rank, worker in enumerate(record.grid):
            if rank not in ranks:
                is_late = worker in gathering.asked - gathering.told.keys()
                told = f"it did not answer within {_LATE_S:.0f} s" if is_late else "it does not have this step any more"
                missing[rank] = self._lost.get(worker) or f"worker {worker}: {told}"
        told_by = tuple(ranks[rank] for rank in sorted(ranks))
        return StepTimeline(step=step, generation=generation, plan=record.plan, ranks=told_by, missing=missing)

    # -- what people want, on any thread ------------------------------------------------------------------

    def timeline(self, step: int | None) -> DeskAnswer:
        """The timeline of a step, which may lie ahead; without a step: of the newest one. Reads the disk."""
        with self._lock:
            step = self._step if step is None else step
            if self._newest is None or step < 0:
                return refusal(409, "no step is over yet. Name one with --step, and wait for it, or try again soon")
            self._settle()
            is_coming = step in self._wanted or step in self._writing
            if step in self._wanted:
                self._wanted[step].keeps = True
        if not is_coming:
            if (kept := read_timeline(self._run_dir, step)) is not None:
                return DeskAnswer(200, kept.model_dump_json().encode())
            if (objection := self._want(step)) is not None:
                return objection
        return DeskAnswer(202, json.dumps({"step": step, "newest": self._step}).encode())

    def _want(self, step: int) -> DeskAnswer | None:
        """Ask the workers; or say why not."""
        with self._lock:
            if step in self._unknown:
                self._unknown.discard(step)
                kept = ", ".join(map(str, kept_steps(self._run_dir))) or "no step"
                return refusal(
                    404,
                    f"step {step} is over and was not recorded: workers remember only their newest steps. Recorded: "
                    f"{kept}. Name one of these, or a step that lies ahead: the newest is {self._step}",
                )
            if (steps := self._steps()) is not None and step >= steps:
                return refusal(422, f"there is no step {step}: the run has steps 0 to {steps - 1}")
            if len(self._wanted) >= _MOST_WANTED:
                return refusal(429, f"{_MOST_WANTED} steps are waited for already. Try again once some are over")
            gathering = self._wanted[step] = _Gathering()
            assert self._newest is not None
            self._ask(step, gathering, self._newest.grid)
            return None

    def profile(self, rank: int, first: int, last: int) -> DeskAnswer:
        """Ask a rank for a profile of steps ``first`` to ``last``."""
        with self._lock:
            record = self._newest
            if record is None:
                return refusal(409, "no generation has begun: there are no ranks yet. Try again soon")
            if rank >= record.plan.workers:
                return refusal(422, f"there is no rank {rank}: ranks are 0 to {record.plan.workers - 1}")
            if not first <= last < first + PROFILE_STEPS:
                return refusal(422, f"a profile is of at least one and at most {PROFILE_STEPS} steps")
            if first <= self._step:
                return refusal(404, f"step {first} is over: the newest is {self._step}. Name steps that lie ahead")
            worker, request = record.grid[rank], ProfileSteps(first=first, last=last)
            while len(self._profiles) >= _MOST_PROFILES:
                del self._profiles[next(iter(self._profiles))]
            self._profiles[rank, first] = _Profile(worker, request)
            self._send(worker, request)
            return DeskAnswer(202, json.dumps({"step": last, "newest": self._step}).encode())

    def profiled(self, rank: int, first: int) -> DeskAnswer:
        """Answer with the profile that was asked for, or with its progress or failure."""
        with self._lock:
            profile = self._profiles.get((rank, first))
            if profile is None:
                return refusal(404, f"nobody has asked for a profile of rank {rank} from step {first} on. Ask again")
            if profile.failure is not None:
                return refusal(409, f"rank {rank} made no profile: {profile.failure}")
            if profile.count and len(profile.parts) == profile.count:
                return DeskAnswer(200, b"".join(profile.parts[number] for number in range(profile.count)))
            return DeskAnswer(202, json.dumps({"step": profile.request.last, "newest": self._step}).encode())


def _rows(record: GenerationRecord) -> int:
    """About how many actions a step has over all ranks."""
    plan = record.plan
    return sum(3 * depth * share for depth, share in zip(plan.depths, plan.shares, strict=True))
