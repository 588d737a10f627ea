"""The check at the start of a run: does the loss of a batch equal the weighted mean of its halves?"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from varuna.core.errors import ModelError
from varuna.data.samples import MicroBatch, SampleSource
from varuna.partition.capture import LossModule, Recipe
from varuna.partition.initialise import Initial
from varuna.partition.inputs import check_inputs
from varuna.partition.model import PartitionedModel

_LOOKED_AT = 16
"""Samples searched for two that weigh differently: padding shows only there."""
_TOLERANCE = 2e-5
"""Relative; fp32 sums differ by about 1e-7, an unshifted count of labels by 1e-4."""

WeightFunction = Callable[[dict[str, Tensor]], float | Tensor]


def weight_of(
    model: PartitionedModel, weight: WeightFunction | None, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> float:
    """How much a batch counts: the user's word, else targets, else examples."""
    if weight is not None:
        return float(weight(dict(batch)))
    size = len(next(iter(batch.values())))
    if model.counter is None:
        return float(size)
    counter = model.counter
    sizes = [size] if counter.needs_batch_size else []
    fixed = [buffers[name] for name in counter.buffers] + [model.constants[name] for name in counter.constants]
    return float(counter.module(*[batch[key] for key in counter.inputs], *sizes, *fixed)[0])


def check_weighing(
    model: PartitionedModel, recipe: Recipe, initial: Initial, source: SampleSource, weight: WeightFunction | None
) -> None:
    """Compare one batch of two samples, unequal if there are such, with its weighted halves.

    Raises:
        ModelError: they differ, so the loss would depend on P, D and m.
        DataError: a sample is not shaped like those that were captured.
    """

    def counted_in(batch: MicroBatch) -> float:
        check_inputs(model.inputs, batch.tensors, batch.indices)
        return weight_of(model, weight, batch.tensors, initial.buffers)

    first, second = _pair(source, counted_in)
    both = source.micro_batch([first, second])
    halves = [source.micro_batch([position]) for position in (first, second)]
    losses = LossModule(initial.module.eval(), recipe)
    for magnified in (True, False):
        with torch.no_grad(), _magnified(initial) if magnified else nullcontext():
            whole = _weighted(losses, both, counted_in(both))
            parts = sum(_weighted(losses, half, counted_in(half)) for half in halves)
        if math.isfinite(whole) and math.isfinite(parts):
            break
    initial.module.train()
    if abs(whole - parts) > _TOLERANCE * max(abs(whole), abs(parts), 1e-6):
        counted = "weight(batch)" if weight else "the number of targets" if model.counts_targets else "examples"
        raise ModelError(
            f"the loss of a batch is not the mean of its parts weighted by {counted}: for dataset indices "
            f"{list(both.indices)} the whole gives {whole:.6g}, the parts {parts:.6g} (loss times weight). "
            "Micro-batches would train another model than the whole batch. Pass weight=fn(batch) that returns what "
            "the loss averages over, such as weight=lambda batch: (batch['labels'][:, 1:] != -100).sum()."
        )


@contextmanager
def _magnified(initial: Initial) -> Iterator[None]:
    """Parameters times 4, exactly undone: a fresh model finds all samples about equally hard, and hides the error."""
    for value in initial.parameters.values():
        value.mul_(4)
    try:
        yield
    finally:
        for value in initial.parameters.values():
            value.div_(4)


def _pair(source: SampleSource, counted_in: Callable[[MicroBatch], float]) -> tuple[int, int]:
    """Positions of two samples of unequal, non-zero weight if there are such among the first; else of the first two."""
    weights: dict[float, int] = {}
    for position in range(_LOOKED_AT if source.size is None else min(_LOOKED_AT, source.size)):
        found = counted_in(source.micro_batch([position]))
        if found > 0:
            weights.setdefault(found, position)
        if len(weights) == 2:
            break
    positions = [*weights.values(), 0, 1]
    return positions[0], next(position for position in positions[1:] if position != positions[0])


def _weighted(losses: LossModule, batch: MicroBatch, weight: float) -> float:
    return float(losses(batch.tensors)[0]) * weight if weight else 0.0
