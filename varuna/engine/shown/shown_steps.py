"""This worker's answers to people who ask to see steps: timelines of recent ones, profiles of coming ones."""

from collections.abc import Callable

import torch

from varuna.core.messages import ProfileSteps, Shown, ShowRequest, ShowStep
from varuna.engine.shown.recent_steps import RecentSteps
from varuna.engine.shown.step_profiler import StepProfiler

_FINISH_S = 5.0


class ShownSteps:
    """Told by the training thread of each step; asked by the membership's.

    Args:
        tell: sends an answer.
        device: that the stage computes on.
    """

    def __init__(self, tell: Callable[[Shown], None], device: torch.device) -> None:
        self.recent, self._profiler = RecentSteps(tell), StepProfiler(tell, device)

    def request_steps(self, request: ShowRequest) -> None:
        """Note a request to see steps."""
        match request:
            case ShowStep(step=step):
                self.recent.request_step(step)
            case ProfileSteps():
                self._profiler.request_profile(request)

    def before(self, step: int) -> bool:
        """Note that a step begins; return whether it is profiled, so that it will not take what steps take."""
        self._profiler.before(step)
        return self._profiler.is_running

    def after(self, step: int) -> None:
        """Note that a step is over."""
        self._profiler.after(step)

    def interrupt(self) -> None:
        """Give up a profile, since the generation ends."""
        self._profiler.abandon("the workers of the run changed in the middle of these steps. Ask again, for later ones")

    def finish(self) -> None:
        """Answer for the last time: the loop is over, and no heartbeat follows."""
        self.recent.answer()
        self._profiler.abandon("the run ended before these steps were over")
        self._profiler.finish(_FINISH_S)
