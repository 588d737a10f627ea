"""Answers to the state machine's questions, worked out where nobody waits for them."""

from collections.abc import Callable

from varuna.core.devices import WorkerGroups
from varuna.core.errors import NoPlanError, VarunaError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.state.questions import Checkpoint, FoundCheckpoint, Planned, Unplannable, Unusable, WhichPlan

Planner = Callable[[JobFacts, WorkerGroups, int | None], Plan]
"""Plan for these workers and, if it is not None, this micro-batch; may raise ``NoPlanError``."""


def plan_answer(
    planner: Planner, predicted_s: Callable[[Plan], float], question: WhichPlan, job: JobFacts, running: Plan | None
) -> Planned | Unplannable | Unusable:
    """Make the plan; may take seconds.

    Args:
        planner: makes plans.
        predicted_s: seconds of a step of a plan, by what is known now.
        question: workers, m if it is fixed, and the rate of losses.
        job: what runs.
        running: the plan that runs, if any.
    """
    known = job.model_copy(update={"losses_per_hour": question.losses_per_hour})
    running_s = _running_s(predicted_s, running)
    try:
        return Planned(planner(known, question.workers, question.micro_batch), running_s)
    except NoPlanError as error:
        return Unplannable(str(error), running_s)
    except VarunaError as error:
        return Unusable(str(error), error.exit_code)


def _running_s(predicted_s: Callable[[Plan], float], running: Plan | None) -> float:
    """Seconds of a step of the plan that runs: as it was made, if what was measured since does not fit it."""
    if running is None:
        return 0.0
    try:
        return predicted_s(running)
    except VarunaError:
        return running.step_s


def checkpoint_answer(newest: Callable[[JobFacts], Checkpoint | None], job: JobFacts) -> FoundCheckpoint | Unusable:
    """Look for it; may take as long as the store does not answer."""
    try:
        return FoundCheckpoint(newest(job))
    except VarunaError as error:
        return Unusable(str(error), error.exit_code)
