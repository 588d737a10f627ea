"""What the training loop is given."""

from collections.abc import Mapping
from dataclasses import dataclass

from varuna.core.plan import Plan


@dataclass(frozen=True)
class Step:
    """A committed step, the same on every rank."""

    index: int
    """from 0"""
    loss: float
    """of the global batch: weighted mean over its targets (or examples)"""
    examples: int
    """in the global batch"""
    grad_norm: float
    """global L2 norm before clipping"""
    lr: float
    """of the first parameter group, as used in this step"""
    metrics: Mapping[str, float]
    """sums over the global batch"""
    generation: int
    """a redone step comes again with a higher one"""
    plan: Plan
    is_main: bool
    """true on one rank"""
    skipped: bool
    """fp16 only: gradients overflowed, so nothing was updated and the loss scale was halved"""


@dataclass(frozen=True)
class Evaluation:
    """The loss of a dataset that is not trained on, the same on every rank."""

    loss: float
    """weighted mean over its targets (or examples); NaN if not ``complete``"""
    weight: float
    """targets (or examples) that it is the mean of"""
    examples: int
    metrics: Mapping[str, float]
    """sums over all examples"""
    complete: bool
    """False: a worker was lost meanwhile, or a morph was due; the next call measures again"""
