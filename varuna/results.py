"""Results that a training loop receives: a ``Step`` per committed step, and the ``Evaluation`` of a dataset."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from varuna.core.plan import Plan
from varuna.engine.inference.evaluate import EvaluationSums
from varuna.engine.pipeline.apply import overflowed
from varuna.engine.worker.loop_state import Committed


@dataclass(frozen=True)
class Step:
    """A committed optimizer step. All fields but ``is_main`` and ``step_s`` are the same on every rank."""

    index: int
    """Number of the step, from 0."""
    loss: float
    """Loss of the global batch: the weighted mean over its targets (or examples)."""
    examples: int
    """Number of examples in the global batch, M."""
    epoch: float | None
    """Passes over the dataset that the run has made, this step included; None for a dataset without length."""
    targets: float
    """Divisor of the mean loss: the number of target tokens if the model's loss averages over those (ignored ones
    do not count), else the number of examples, or the sum of the user's ``weight``."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    lr: float
    """Learning rate of the first parameter group, as used in this step."""
    metrics: Mapping[str, float]
    """The user's ``metrics``, summed over the global batch."""
    generation: int
    """Generation that ran the step. A step that is redone appears again with a higher generation."""
    plan: Plan
    """Plan that ran the step."""
    is_main: bool
    """True on exactly one rank: print and log there."""
    skipped: bool
    """fp16 only: gradients overflowed, so nothing was updated and the loss scale was halved."""
    step_s: float
    """Seconds from first action to update on this rank, without checkpoints, morphs and the code of the loop."""

    @property
    def examples_per_s(self) -> float:
        """Examples per second of the whole job."""
        return self.examples / self.step_s

    @property
    def targets_per_s(self) -> float:
        """Targets per second of the whole job: for a language model, tokens per second without padding."""
        return self.targets / self.step_s


@dataclass(frozen=True)
class Evaluation:
    """The loss of a dataset that is not trained on. All fields are the same on every rank."""

    loss: float
    """Weighted mean over the dataset's targets (or examples); NaN if not ``complete``."""
    weight: float
    """Number of targets (or examples) that the loss is a mean over."""
    examples: int
    """Number of examples that were evaluated."""
    metrics: Mapping[str, float]
    """The user's ``metrics``, summed over all examples."""
    complete: bool
    """False if a worker was lost meanwhile, or a morph was due; the next call measures again."""


def values_of(step: Step) -> dict[str, float]:
    """Return the values of a step that charts show."""
    values = {
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "examples_per_s": step.examples_per_s,
        "targets_per_s": step.targets_per_s,
        **{f"metrics/{name}": value for name, value in step.metrics.items()},
        "run/step_s": step.step_s,
        "run/generation": float(step.generation),
        "run/stages": float(step.plan.stages),
        "run/replicas": float(step.plan.replicas),
    }
    return values if step.epoch is None else {**values, "epoch": step.epoch}


def evaluation_of(found: EvaluationSums | None, examples: int) -> Evaluation:
    """The evaluation of ``examples`` examples from its sums; ``found`` is None if a morph interrupted it."""
    if found is None:
        return Evaluation(math.nan, 0.0, examples, {}, complete=False)
    return Evaluation(found.loss, found.weight, examples, found.metrics, complete=True)


def step_of(committed: Committed, examples: int, dtype: torch.dtype, epoch: float | None = None) -> Step:
    """The ``Step`` of a job that computes in ``dtype``; ``epoch``: passes over the dataset with it."""
    totals = committed.totals
    return Step(
        index=committed.step,
        loss=totals.loss,
        examples=examples,
        epoch=epoch,
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
