"""The check at the start of a run: does the loss of a batch equal the weighted mean of its halves?"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from varuna.core.errors import ModelError
from varuna.data.samples import MicroBatch, SampleSource
from varuna.partition.capture import LossModule, Recipe
from varuna.partition.initialise import Initial
from varuna.partition.inputs import check_inputs
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel

_LOOKED_AT = 16
"""Samples searched for two that weigh differently: padding shows only there."""
_TOLERANCE = 2e-5
"""Relative; fp32 sums differ by about 1e-7, an unshifted count of labels by 1e-4."""

_ROUGH = 1e-3
_LOOSE = 0.05
"""Relative error of a ratio of weights, as differences of losses give it."""

WeightFunction = Callable[[dict[str, Tensor]], float | Tensor]


def weight_of(
    model: PartitionedModel, weight: WeightFunction | None, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> float:
    """How much a batch counts: the user's word, else targets, else examples."""
    if weight is not None:
        return float(weight(dict(batch)))
    size = len(next(iter(batch.values())))
    model = model.graphs[variant_of(model, batch, ())]
    counter = model.counter
    if counter is None:
        return float(size)
    sizes = [size] if counter.needs_batch_size else []
    fixed = [buffers[name] for name in counter.buffers] + [model.constants[name] for name in counter.constants]
    return float(counter.module(*[batch[key] for key in counter.inputs], *sizes, *fixed)[0])


def check_weighing(
    model: PartitionedModel,
    recipe: Recipe,
    initial: Initial,
    source: SampleSource,
    weight: WeightFunction | None,
    *,
    fixed: bool = False,
) -> None:
    """Compare one batch of two samples, unequal if there are such, with its weighted halves.

    Args:
        model: as captured.
        recipe: the same.
        initial: the whole model.
        source: reads samples.
        weight: the user's weight of a micro-batch, if any.
        fixed: the user fixed the micro-batch. Then a loss may also compare samples with each other (contrastive ones
            do): no weight makes it a mean over samples.

    Raises:
        ModelError: they differ, so the loss would depend on P, D and m.
        DataError: a sample is not shaped like those that were captured.
    """

    def counted_in(batch: MicroBatch) -> float:
        check_inputs(model.graphs[variant_of(model, batch.tensors, batch.indices)].inputs, batch.tensors, batch.indices)
        return weight_of(model, weight, batch.tensors, initial.buffers)

    pair = _pair(model, source, counted_in)
    if pair is None:
        return
    first, second = pair
    both = source.micro_batch([first, second])
    halves = [source.micro_batch([position]) for position in (first, second)]
    losses = LossModule(initial.module.eval(), replace(recipe, dtype=torch.float32))
    for magnified in (True, False):
        with torch.no_grad(), _magnified(initial) if magnified else nullcontext():
            whole = _weighted(losses, both, counted_in(both))
            parts = sum(_weighted(losses, half, counted_in(half)) for half in halves)
        if math.isfinite(whole) and math.isfinite(parts):
            break
    initial.module.train()
    if abs(whole - parts) > _TOLERANCE * max(abs(whole), abs(parts), 1e-6):
        if fixed and _compares_samples(losses, source, [first, second, *_others(source, first, second)]):
            print("varuna: the loss compares the samples of a micro-batch with each other", file=sys.stderr, flush=True)
            return
        counted = "weight(batch)" if weight else "the number of targets" if model.counts_targets else "examples"
        raise ModelError(
            f"the loss of a batch is not the mean of its parts weighted by {counted}: for dataset indices "
            f"{list(both.indices)} the whole gives {whole:.6g}, the parts {parts:.6g} (loss times weight). "
            "Micro-batches would train another model than the whole batch. Pass weight=fn(batch) that returns what "
            "the loss averages over, such as weight=lambda batch: (batch['labels'][:, 1:] != -100).sum(). A loss that "
            "compares samples with each other (contrastive) needs micro_batch=, the number that it compares."
        )


def _others(source: SampleSource, *known: int) -> list[int]:
    """A third position, if there is one."""
    return [p for p in range(len(known) + 1 if source.size is None else source.size) if p not in known][:1]


def _compares_samples(losses: LossModule, source: SampleSource, positions: list[int]) -> bool:
    """Whether the losses of pairs are no weighted means of the losses of three samples, whatever their weights."""
    if len(positions) < 3:
        return False

    def loss(*chosen: int) -> float:
        with torch.no_grad():
            return float(losses(source.micro_batch(list(chosen)).tensors)[0])

    a, b, c = positions
    alone = {position: loss(position) for position in positions}
    pairs = {pair: loss(*pair) for pair in ((a, b), (b, c), (a, c))}
    if all(abs(pairs[x, y] - alone[x] - alone[y]) <= _ROUGH * abs(pairs[x, y]) for x, y in pairs):
        return False  # a sum
    ratios = []
    for x, y in pairs:
        apart = alone[x] - alone[y]
        if abs(apart) <= _ROUGH * abs(alone[x]):
            return abs(pairs[x, y] - alone[x]) > 10 * _ROUGH * abs(alone[x])
        share = (pairs[x, y] - alone[y]) / apart
        if not 0 < share < 1:
            return True
        ratios.append(share / (1 - share))  # the weight of x over that of y
    return abs(ratios[0] * ratios[1] / ratios[2] - 1) > _LOOSE


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


def _pair(
    model: PartitionedModel, source: SampleSource, counted_in: Callable[[MicroBatch], float]
) -> tuple[int, int] | None:
    """Positions of two samples of one length: of unequal, non-zero weight if there are such among the first."""
    weights: dict[float, int] = {}
    others: list[int] = []
    variants: set[int] = set()
    for position in range(_LOOKED_AT if source.size is None else min(_LOOKED_AT, source.size)):
        batch = source.micro_batch([position])
        variant = variant_of(model, batch.tensors, batch.indices)
        if variants and variant not in variants:
            continue
        variants.add(variant)
        others.append(position)
        found = counted_in(batch)
        if found > 0:
            weights.setdefault(found, position)
        if len(weights) == 2:
            break
    pair = list(dict.fromkeys([*weights.values(), *others]))[:2]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def _weighted(losses: LossModule, batch: MicroBatch, weight: float) -> float:
    return float(losses(batch.tensors)[0]) * weight if weight else 0.0
