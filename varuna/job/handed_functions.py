"""The user's functions that a job runs, with what each is for."""

from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from varuna.job.built import GivenModel, SchedulerLike
from varuna.job.given_optimizer import OptimizerLike, functions_in
from varuna.job.handed_over.watching import (
    AFTER_STEP,
    BEFORE_STEP,
    COLLATE,
    DATASET,
    FROZEN,
    LOSS,
    METRICS,
    MODEL,
    OF_OPTIMIZER,
    OPTIMIZER,
    RAMP,
    SCHEDULER,
    WEIGHT,
    Role,
)
from varuna.job.spec import JobSpec


def functions_of(spec: JobSpec, schedule: LRScheduler | None = None) -> Iterator[tuple[Role, Any]]:
    """Functions and objects whose code runs in training, but for those that build what the script has built."""
    yield from ((LOSS, spec.loss.function), (METRICS, spec.metrics))
    yield from (
        (RAMP, spec.batch_ramp),
        (FROZEN, spec.frozen),
        (BEFORE_STEP, spec.before_step),
        (AFTER_STEP, spec.after_step),
    )
    yield from ((COLLATE, spec.collate.function), (WEIGHT, spec.loss.weight), (DATASET, spec.dataset))
    if not isinstance(spec.model, GivenModel):
        yield MODEL, spec.model
    if not isinstance(spec.optimizer, OptimizerLike):
        yield OPTIMIZER, spec.optimizer
    else:
        yield from ((OF_OPTIMIZER, each) for _, each in functions_in(spec.optimizer.whole, set()))
    if not isinstance(spec.lr_scheduler, SchedulerLike):
        yield SCHEDULER, spec.lr_scheduler
    if schedule is not None:
        yield from ((SCHEDULER, each) for each in _lambdas(schedule))


def _lambdas(schedule: LRScheduler) -> Iterator[Any]:
    for value in vars(schedule).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, LRScheduler):
                yield from _lambdas(each)
            elif callable(each):
                yield each
