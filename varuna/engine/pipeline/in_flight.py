"""A micro-batch on its way through a stage."""

from dataclasses import dataclass, field

from varuna.engine.stage.section import Tape
from varuna.engine.stage.stage import Left


@dataclass
class Flight:
    """A micro-batch between its F and its B, or its W, on this stage."""

    size: int
    """examples"""
    variant: int
    weight: float = 0.0
    """the gradient of the global batch's sum with respect to the loss"""
    tapes: list[Tape] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
