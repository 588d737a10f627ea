"""Actions: the units of work of a stage."""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of an action on a micro-batch. Its backward is either one B, or an I and later a W."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT = "I"
    """The half of a backward that makes the gradient of the input, which is sent upstream at once."""
    WEIGHT = "W"
    """The rest of a backward: gradients of the weights, which are needed at the step's end only."""

    __hash__ = object.__hash__  # an enum's own is Python code, and simulations look kinds up a million times


class Action(NamedTuple):
    """One unit of work of a stage; prints as ``2F0`` (stage 2, forward, micro-batch 0).

    ``micro_batch`` counts within the replica, from 0 to N - 1.
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Row = tuple[Action, ...]
"""Actions that one stage runs, in order."""

Orders = tuple[Row, ...]
"""A row for each stage: a whole step of a pipeline."""
