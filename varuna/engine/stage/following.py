"""The user's ``after_step`` on one stage: once a step is certain, so that nothing of it is ever undone."""

from collections.abc import Mapping

from torch import Tensor

from varuna.engine.stage.job import Job
from varuna.engine.stage.precision import ComputeCopies
from varuna.partition import after_step


def follow(
    job: Job, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], compute: ComputeCopies, step: int
) -> None:
    """Let it change a stage's parameters and buffers.

    Args:
        job: has the function, and what its dry run showed.
        parameters: all of the stage, after the optimizer.
        buffers: those that steps change.
        compute: copies of parameters, to be renewed.
        step: that was applied.

    Raises:
        UsageError: it computes with what the stage does not hold.
    """
    function, following = job.after_step, job.model.following
    if function is not None and following is not None:
        after_step.run(function, following, parameters, buffers, step, seed=job.seed, device=job.device)
        compute.refresh({name: value for name, value in parameters.items() if name in following.written})
