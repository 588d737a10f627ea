"""Keeps a run within its budget: looks once a second, and asks for what ``machine.budget`` decides."""

import time
from collections.abc import Callable

from varuna.core.units import counted
from varuna.fleet.machine.budget import Decision, Left, Seen, decide, left_of, reason_to_end
from varuna.fleet.manager.mailbox import Posted
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.state.account import Account
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import FinishRequested, SaveRequested, StopRequested
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import Budgeted, CheckpointCommitted, Notice, RunEvent, StepRecorded

_LOOK_S = 1.0
_WRONG_USE = 2


class BudgetKeeper:
    """For the manager's thread.

    Args:
        chronicle: knows the budget, and what has been used up.
        saving_s: that saving took in earlier starts; None: nobody knows.
        time_s: seconds since 1970.
    """

    def __init__(
        self, chronicle: Chronicle, saving_s: float | None = None, time_s: Callable[[], float] = time.time
    ) -> None:
        self._chronicle, self._time_s = chronicle, time_s
        self._looked_s = float("-inf")
        self._recorded: dict[int, float] = {}  # steps that no complete checkpoint has, and when they were recorded
        self._saving_s = saving_s
        self._tried_saving = self._has_cut = False

    def add_event(self, event: RunEvent, now_s: float) -> None:
        """Note an event: from a step to its checkpoint is what saving takes."""
        match event:
            case StepRecorded(step=step):
                self._recorded[step] = now_s
            case CheckpointCommitted(step=steps):
                if (recorded_s := self._recorded.get(steps - 1)) is not None:
                    self._saving_s = max(self._saving_s or 0.0, now_s - recorded_s)
                self._recorded = {step: at_s for step, at_s in self._recorded.items() if step >= steps}
            case _:
                pass

    def wanted_now(self, fleet: Fleet, now_s: float) -> list[Posted]:
        """Return what the budget asks for now, by the clock of the fleet."""
        budget = self._chronicle.budget
        if budget is None or isinstance(fleet.phase, Ended) or self._has_cut or now_s < self._looked_s + _LOOK_S:
            return []
        self._looked_s = now_s
        job = fleet.job
        if job is not None and (job.checkpoint_dir is None or job.rescues):
            self._has_cut = True
            return [StopRequested(_NO_CHECKPOINTS, _WRONG_USE)]
        left = left_of(budget, self._chronicle.used(self._time_s()))
        decided = decide(
            left,
            Seen(_step_s(fleet), self._saving_s),
            is_ending=fleet.requests.finish is not None,
            is_saved=fleet.recorded.saved_step > fleet.recorded.step,
            tried_saving=self._tried_saving,
        )
        return self._asked_for(decided, fleet, budget, left)

    def account(self) -> Account:
        """Return what the run has used up until now."""
        return self._chronicle.account(self._time_s()).model_copy(update={"saving_s": self._saving_s})

    def _asked_for(self, decided: Decision, fleet: Fleet, budget: Budgeted, left: Left) -> list[Posted]:
        reason = reason_to_end(budget, left)
        match decided:
            case Decision.SAVE if fleet.history and fleet.formed:
                self._tried_saving = True
                return [Notice(text="how long saving takes must be known for the budget's sake"), SaveRequested()]
            case Decision.FINISH:
                return [Notice(text=f"{reason}. The run ends after the current step"), FinishRequested(reason)]
            case Decision.CUT:
                self._has_cut = True
                unsaved = fleet.recorded.step + 1 - fleet.recorded.saved_step if fleet.history else 0
                lost = (
                    f"; {counted(unsaved, 'step')} are in no checkpoint, and are repeated then" if unsaved > 0 else ""
                )
                return [StopRequested(f"{reason}. What still ran was cut off{lost}", int(unsaved > 0))]
            case _:
                return []


_NO_CHECKPOINTS = (
    "a run with --max-cost or --max-hours needs checkpoints: give the script's Trainer checkpoints=PLACE, so that what "
    "was paid for outlives the end of the budget"
)


def _step_s(fleet: Fleet) -> float:
    """Seconds from one step to the next; before the second one, as planned."""
    measured_s = max(fleet.recorded.every_s, fleet.recorded.wall_s)
    return measured_s or (fleet.record.plan.step_s if fleet.history else 0.0)
