"""How much a batch counts, and what its sections are told of the whole batch."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from varuna.partition.lengths import variant_of
from varuna.partition.loss.whole_batch import SHARE
from varuna.partition.model import PartitionedModel

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


def known_to(model: PartitionedModel, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers and constants that numbers of the whole batch are computed with, in host memory."""
    if model.whole is None:
        return {}
    counter, names = model.whole.counter, set(model.whole.fixed)
    names.update(() if counter is None else (*counter.buffers, *counter.constants))
    return {name: (buffers[name] if name in buffers else model.constants[name]).cpu() for name in names}


def numbers_of(
    model: PartitionedModel, parts: Sequence[Mapping[str, Tensor]], buffers: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """What the sections are given for each part, where these are the whole batch; nothing if its loss needs nothing.

    Args:
        model: one graph.
        parts: collated samples, in host memory.
        buffers: at least those that the counts need.
    """
    whole = model.whole
    if whole is None:
        return [{} for _ in parts]
    known, sizes = known_to(model, buffers), [len(next(iter(part.values()))) for part in parts]
    rows = [whole.counts(part, known, size) for part, size in zip(parts, sizes, strict=True)]
    numbers = whole.numbers([math.fsum(column) for column in zip(*rows, strict=True)], known)
    return [{**numbers, SHARE: torch.tensor(size / sum(sizes))} for size in sizes]


def completed(model: PartitionedModel, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch with all that sections are given where it is the whole batch."""
    (numbers,) = numbers_of(model, [{key: value.cpu() for key, value in batch.items()}], buffers)
    device = next(iter(batch.values())).device
    return {**batch, **{key: value.to(device) for key, value in numbers.items()}}
