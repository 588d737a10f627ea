"""Randomness of the user's code in an update: keyed by (seed, step, parameter), alike on all replicas, in any plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from varuna.data.randomness import Keyed, SeededTurn
from varuna.engine.stage.job import Job
from varuna.partition.optimizers import NamedParameters


def drawing(job: Job, step: int, *, runs_torch_alone: bool) -> AbstractContextManager[object]:
    """Seed what a step's update draws; nothing to do for one that ``runs_torch_alone``."""
    is_users = job.before_step is not None or not runs_torch_alone
    return SeededTurn(job.seed, "update", step) if is_users else nullcontext()


def call_before_step(function: Callable[[NamedParameters], None] | None, named: NamedParameters) -> None:
    """Call ``before_step=``, if there is one; what it draws for a parameter does not depend on the others."""
    if function is not None:
        function(Keyed(named, [name for name, _ in named], "before_step"))
