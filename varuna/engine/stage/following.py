"""Values that follow the optimizer's parameters: averages in their place, and what ``after_step`` changes."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from varuna.checkpoint.io.section_state import AVERAGE, JSON
from varuna.engine.stage.job import Job
from varuna.engine.stage.precision import ComputeCopies
from varuna.partition import after_step


class KeepsState(Protocol):
    """A stage's optimizer."""

    def state_of(self, name: str) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """State of a parameter: tensors, and values that are not tensors."""


def averaged(computed: Mapping[str, Tensor], optimizer: KeepsState) -> dict[str, Tensor]:
    """Return the values that sections compute with, by parameter: averages where there are any."""
    found = {name: optimizer.state_of(name)[0].get(AVERAGE) for name in computed}
    return {
        name: value if (average := found[name]) is None else average.to(value.device, value.dtype)
        for name, value in computed.items()
    }


def follow(
    job: Job, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], compute: ComputeCopies, step: int
) -> None:
    """Let ``after_step`` change a stage's parameters and buffers: once a step is certain, so nothing is ever undone.

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
