"""Averages of parameters, which the optimizer keeps, in the place of the parameters."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from varuna.checkpoint.io.section_state import AVERAGE, JSON


class KeepsState(Protocol):
    """A stage's optimizer."""

    def state_of(self, name: str) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """State of a parameter: tensors, and values that are not tensors."""


def averaged(computed: Mapping[str, Tensor], optimizer: KeepsState) -> dict[str, Tensor]:
    """What sections compute with, by parameter: averages where there are any, as they would compute with the value."""
    found = {name: optimizer.state_of(name)[0].get(AVERAGE) for name in computed}
    return {
        name: value if (average := found[name]) is None else average.to(value.device, value.dtype)
        for name, value in computed.items()
    }
