"""A run as its user sees it while it goes on: events become lines, and between them the state of the fleet does."""

import threading
import time
from collections import deque
from collections.abc import Callable

from varuna.core.messages import WorkerPhase
from varuna.core.units import counted
from varuna.fleet.state.fleet import Ended, Finishing, Fleet, Idle, Running, Stopping
from varuna.fleet.state.run_events import GenerationStarted, Notice, RunEvent, StepRecorded, WorkerLost
from varuna.fleet.state.worker import Standing
from varuna.observe.progress import closing_line, morph_line, plan_line, progress_line, risk_line
from varuna.observe.report import RunHistory
from varuna.observe.terminal import Progress
from varuna.process.threads import start

_LOOK_S = 0.25
_RECENT_STEPS = 32


class RunView:
    """Shows a run's events as they come, and collects its history.

    Args:
        progress: where lines go.
        total: steps of the whole run; 0: what the fleet's job says, once it is watched.
        tokens_per_example: given, the rate is in tokens.
        clock: seconds.
    """

    def __init__(
        self,
        progress: Progress,
        total: int = 0,
        tokens_per_example: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = RunHistory()
        self._progress, self._total, self._tokens_per_example = progress, total, tokens_per_example
        self._clock, self._began_s = clock, clock()
        self._fleet: Callable[[], Fleet] | None = None
        self._phase, self._phase_s = "", self._began_s
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._over = threading.Event()

    def recall(self, event: RunEvent) -> None:
        """Take an event that an earlier manager has already shown."""
        self.history.take(event)

    def __call__(self, event: RunEvent) -> None:
        """Take the next event; called on the run's own thread."""
        morph = self.history.take(event)
        if morph is not None:
            self._progress.tell(morph_line(morph, self._progress.arrow), style="yellow")
        match event:
            case GenerationStarted():
                self._begin()
            case StepRecorded(step=step, loss=loss, examples_per_s=rate):
                left_s, total = self._left_s(step), self._steps_in_all()
                row = self.history.generations[-1]
                line = progress_line(step, total, loss, rate, self._tokens_per_example, row, left_s)
                self._progress.show(line, final=step + 1 == total)
            case WorkerLost(cause=cause) if not self.history.generations:
                self._progress.tell(f"lost   {cause}", style="yellow")
            case Notice(text=text, warning=warning):
                self._progress.tell(f"warning  {text}" if warning else text, style="red" if warning else "dim")

    def watch(self, fleet: Callable[[], Fleet]) -> None:
        """Look at the fleet from time to time, on a thread of this view's own, until ``close``."""
        self._fleet = fleet
        start("view", self._look)

    def close(self, ended: Ended | None, checkpoint: str | None) -> None:
        """The run is over, or goes on without its manager (None): say how it went, unless it never began."""
        self._over.set()
        if ended is not None and self.history.generations:
            line = closing_line(self.history, ended.exit_code, self._clock() - self._began_s, checkpoint)
            self._progress.tell(line, style="red" if ended.exit_code else "green")

    # -- what the fleet says between events ------------------------------------------------------------------

    def look(self, fleet: Fleet) -> None:
        """Show what the run does now: in a log once, on a terminal with the seconds that it has taken."""
        phase, now_s = phase_of(fleet), self._clock()
        if phase != self._phase:
            self._phase, self._phase_s = phase, now_s
            if phase and not self._progress.is_live and len(fleet.history) <= 1:
                self._progress.tell(phase, style="dim")
        if not phase:
            self._progress.refresh()
        elif self._progress.is_live:
            self._progress.show(f"{phase}  {now_s - self._phase_s:.0f} s")

    def _look(self) -> None:
        assert self._fleet is not None
        while not self._over.wait(_LOOK_S):
            self.look(self._fleet())

    def _begin(self) -> None:
        """A generation begins: say what it runs if it is the first, and what it puts at risk if that is new."""
        row, *before = reversed(self.history.generations)
        self._steps.clear()
        if not before:
            self._progress.tell(plan_line(row))
        job = self._fleet().job if self._fleet is not None else None
        is_new = not before or before[0].plan.replicas > 1
        if is_new and (risk := risk_line(row, job)):
            self._progress.tell(risk, style="yellow")

    def _steps_in_all(self) -> int:
        job = self._fleet().job if self._fleet is not None else None
        return self._total or (job.steps if job is not None else 0)

    def _left_s(self, step: int) -> float | None:
        """Seconds to the end of the run at the pace of the newest steps; None as long as there is no pace."""
        self._steps.append((step, self._clock()))
        (first, first_s), (last, last_s) = self._steps[0], self._steps[-1]
        total = self._steps_in_all()
        return (last_s - first_s) / (last - first) * (total - 1 - last) if last > first and total > last + 1 else None


def phase_of(fleet: Fleet) -> str:
    """What a run does that is not training, in words; empty while it trains."""
    match fleet.phase:
        case Idle() if not fleet.history:
            ready = fleet.workers.count(Standing.JOINED)
            if fleet.config.elastic:
                return f"waiting for machines: {ready} of {fleet.config.workers} workers have joined"
            if ready < fleet.wanted:
                return f"starting {counted(fleet.wanted, 'worker')}, {ready} ready: loading torch, capturing the model"
            return "planning"
        case Idle() | Stopping():
            return "morphing"
        case Running() if not fleet.formed:
            return _forming(fleet)
        case Finishing():
            return "finishing: the script runs to its end"
        case _:
            return ""


def _forming(fleet: Fleet) -> str:
    """What rank 0 says of the way to its first step."""
    beat = fleet.workers[fleet.members[0]].beat
    match beat.phase if beat is not None and beat.generation == fleet.generation else None:
        case WorkerPhase.CHECKS:
            return "checking the model against plain PyTorch"
        case WorkerPhase.STEPS | WorkerPhase.LOOP:
            return "running the first step"
        case _:
            return "connecting the workers"
