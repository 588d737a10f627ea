"""A run as its user sees it while it trains: events become lines, and between them the state of the fleet does."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from varuna.fleet.page.pace import StepPace
from varuna.fleet.page.phases import phase_of
from varuna.fleet.page.story import Mark, sentence_of
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import (
    GenerationStarted,
    Notice,
    RunEvent,
    StepRecorded,
    TrainingEnded,
    WorkerLost,
)
from varuna.observe.live_view import clock, live_view, rule
from varuna.observe.progress import closing_line, morph_line, plan_line, progress_line, risk_line
from varuna.observe.report import RunHistory
from varuna.observe.terminal import Progress
from varuna.process.threads import start

_LOOK_S = 0.25
_ROWS_OF_A_LOW_VIEW = 4
_STORY = {"begin": "green", "lost": "red", "morph": "yellow", "asked": "cyan"}
"""Kinds of sentences that stand in the live view, and above it once newer ones have pushed them out."""


class RunView:
    """Shows a run's events as they come, and collects its history.

    On a terminal a live view stands at the bottom; what happens is told there, and goes up into the log when newer
    things need the room. Elsewhere there is a line for each.

    Args:
        progress: where lines go.
        total: steps of the whole run; 0: what the fleet's job says, once it is watched.
        tokens_per_example: given, the rate is in tokens.
        clock: seconds.
        time_s: seconds since 1970.
    """

    def __init__(
        self,
        progress: Progress,
        total: int = 0,
        tokens_per_example: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        time_s: Callable[[], float] = time.time,
    ) -> None:
        self.history = RunHistory()
        self._progress, self._total, self._tokens_per_example = progress, total, tokens_per_example
        self._clock, self._began_s, self._time_s = clock, clock(), time_s
        self._fleet: Callable[[], Fleet] | None = None
        self._glance: Callable[[], Mapping[str, Any]] | None = None
        self._phase, self._phase_s = "", self._began_s
        self._before: int | None = None  # steps that were done when this manager began
        self._pace, self._story = StepPace(), deque[Mark]()
        self._over = threading.Event()

    def recall(self, event: RunEvent) -> None:
        """Take an event that an earlier manager has already shown."""
        self.history.add_event(event)

    def __call__(self, event: RunEvent) -> None:
        """Take the next event; called on the run's own thread."""
        if self._before is None:
            self._before = self.history.steps
        morph = self.history.add_event(event)
        is_pictured = self._glance is not None and self._progress.is_live
        if is_pictured:
            self._remember(event)
        elif morph is not None:
            self._progress.print_line(morph_line(morph, self._progress.arrow), style="yellow")
        match event:
            case GenerationStarted():
                self._begin(is_pictured)
            case StepRecorded(step=step, loss=loss, examples_per_s=rate) if not is_pictured:
                total = self._steps_in_all()
                self._pace.add_step(step, self._clock())
                row, left_s = self.history.generations[-1], self._pace.left_s(total)
                line = progress_line(step, total, loss, rate, self._tokens_per_example, row, left_s)
                self._progress.show(line, final=step + 1 == total)
            case WorkerLost(cause=cause) if not self.history.generations and not is_pictured:
                self._progress.print_line(f"lost   {cause}", style="yellow")
            case TrainingEnded():
                self._progress.show("", final=self._progress.is_live)
                if (mark := sentence_of(event, self._time_s(), None)) is not None:
                    self._progress.print_line(mark.text)
            case Notice(text=text, warning=warning):
                self._progress.print_line(f"warning  {text}" if warning else text, style="red" if warning else "dim")

    def watch(self, fleet: Callable[[], Fleet], glance: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Look at the run from time to time, on a thread of this view's own, until ``close``.

        Args:
            fleet: what the run does.
            glance: what the live view shows; None: there is one line on a terminal, too.
        """
        self._fleet, self._glance = fleet, glance
        start("view", self._look)

    def close(self, ended: Ended | None, checkpoint: str | None, spent: str = "") -> None:
        """Say how a run went that is over, or continues without its manager (None), unless it never began."""
        self._over.set()
        self._progress.show("", final=self._progress.is_live)
        while self._story:
            self._push_out()
        if ended is not None and self.history.generations:
            elapsed_s = self._clock() - self._began_s
            line = closing_line(self.history, ended.exit_code, elapsed_s, checkpoint, spent, before=self._before or 0)
            self._progress.print_line(line, style="red" if ended.exit_code else "green")

    # -- the live view ---------------------------------------------------------------------------------------

    def _remember(self, event: RunEvent) -> None:
        """Keep an event for the live view; notices are told in full at once."""
        mark = sentence_of(event, self._time_s(), None)
        if mark is None or mark.kind not in _STORY:
            return
        self._story.append(mark)
        while len(self._story) > max(2, self._progress.size[1] // 4):
            self._push_out()

    def _push_out(self) -> None:
        mark = self._story.popleft()
        self._progress.print_line(f"{clock(mark.time_s)}  {mark.text}", style=_STORY[mark.kind])

    def _picture(self, glance: Mapping[str, Any], doing_s: float) -> None:
        width, rows = self._progress.size
        status = {**glance, "marks": [mark._asdict() for mark in tuple(self._story)]}
        is_plain = self._progress.is_plain
        heads = (rule(plain=is_plain),) if rows > _ROWS_OF_A_LOW_VIEW else ()
        self._progress.show(live_view(status, width, rows, plain=is_plain, doing_s=doing_s, heads=heads))

    # -- what the fleet says between events ------------------------------------------------------------------

    def show_now(self, fleet: Fleet) -> None:
        """Show what the run does now: in a log once, on a terminal with the seconds that it has taken."""
        phase, now_s = phase_of(fleet), self._clock()
        if phase != self._phase:
            self._phase, self._phase_s = phase, now_s
            if phase and not self._progress.is_live and len(fleet.history) <= 1:
                self._progress.print_line(phase, style="dim")
        if self._glance is not None and self._progress.is_live:
            self._picture(self._glance(), now_s - self._phase_s)
        elif not phase:
            self._progress.refresh()
        elif self._progress.is_live:
            self._progress.show(f"{phase}  {now_s - self._phase_s:.0f} s")

    def _look(self) -> None:
        assert self._fleet is not None
        while not self._over.wait(_LOOK_S):
            self.show_now(self._fleet())

    def _begin(self, is_pictured: bool) -> None:
        """Say what a new generation runs if it is the first, and what it puts at risk if that is new."""
        row, *before = reversed(self.history.generations)
        self._pace.begin_generation()
        if not before and not is_pictured:
            self._progress.print_line(plan_line(row))
        job = self._fleet().job if self._fleet is not None else None
        is_new = not before or before[0].plan.replicas > 1 or before[0].copies is not row.copies
        if is_new and job is not None:
            saved, rescues = job.checkpoint_dir, job.rescues
            if risk := risk_line(row.plan.replicas, row.copies, checkpoint_dir=saved, rescues=rescues):
                self._progress.print_line(risk, style="yellow")

    def _steps_in_all(self) -> int:
        job = self._fleet().job if self._fleet is not None else None
        return self._total or (job.steps if job is not None else 0)
