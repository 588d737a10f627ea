"""What the training loop is given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from varuna.core.plan import Plan
from varuna.engine.evaluate import Sums
from varuna.engine.session import Committed
from varuna.engine.step import overflowed


@dataclass(frozen=True)
class Step:
    """A committed step, the same on every rank but for ``is_main`` and ``step_s``."""

    index: int
    """from 0"""
    loss: float
    """of the global batch: weighted mean over its targets (or examples)"""
    examples: int
    """in the global batch"""
    targets: float
    """what the loss is the mean of: target tokens where the model's loss averages over them, ignored ones left out;
    else examples, or the sum of the user's ``weight``"""
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
    step_s: float
    """from its first action to its update, on this rank: without checkpoints, morphs and the code of the loop"""

    @property
    def examples_per_s(self) -> float:
        """Of the whole job."""
        return self.examples / self.step_s

    @property
    def targets_per_s(self) -> float:
        """Of the whole job: tokens per second, for a language model, padding left out."""
        return self.targets / self.step_s


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


def evaluation_of(found: Sums | None, examples: int) -> Evaluation:
    """An evaluation of so many examples; None: a morph came in between."""
    if found is None:
        return Evaluation(math.nan, 0.0, examples, {}, complete=False)
    return Evaluation(found.loss, found.weight, examples, found.metrics, complete=True)


def step_of(committed: Committed, examples: int, dtype: torch.dtype) -> Step:
    """A committed step of a job with so many examples per step, which computes in ``dtype``."""
    totals = committed.totals
    return Step(
        index=committed.step,
        loss=totals.loss,
        examples=examples,
        targets=totals.weight,
        grad_norm=totals.grad_norm,
        lr=totals.lr,
        metrics=totals.metrics,
        generation=committed.generation,
        plan=committed.plan,
        is_main=committed.is_main,
        skipped=overflowed(dtype, totals),
        step_s=committed.step_s,
    )
