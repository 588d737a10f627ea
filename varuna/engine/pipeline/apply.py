"""From the result of a vote to a step that is applied."""

import math
from collections.abc import Sequence

import torch

from varuna.core.vote import StepTotals, VoteLayout
from varuna.engine.stage.stage import Stage


def apply_vote(stage: Stage, step: int, vector: Sequence[float]) -> StepTotals:
    """Apply a step by the result of its vote, unless that is done."""
    totals = layout_of(stage).read(vector)
    # Other threads (saves, copies) read the state only at a step boundary: never half of an update.
    stage.still.close_for_update()
    stage.apply(step, scale_of(stage, totals), overflowed=overflowed(stage.job.dtype, totals))
    stage.still.open_at(stage.next_step)
    return totals


def overflowed(dtype: torch.dtype, totals: StepTotals) -> bool:
    """Return whether an fp16 step is skipped: one decision for the job, since every rank reads the same vote."""
    return dtype is torch.float16 and not math.isfinite(totals.grad_norm)


def layout_of(stage: Stage) -> VoteLayout:
    """Return the layout of the votes under a stage's plan."""
    plan = stage.plan
    return VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches, metrics=stage.job.model.metrics)


def scale_of(stage: Stage, totals: StepTotals) -> float:
    """Return the factor from the weighted sum of gradients to the clipped mean; 0 where no target was counted."""
    if not totals.weight:
        return 0.0
    limit = stage.job.clip_grad_norm
    # The formula of torch's clip_grad_norm_, 1e-6 included.
    clip = 1.0 if limit is None else min(1.0, limit / (totals.grad_norm + 1e-6))
    return clip / totals.weight
