"""The weight of a batch, and the numbers that its sections must know of the whole batch."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from varuna.data.nest import nested
from varuna.partition.cut.split import SectionGraph
from varuna.partition.lengths import variant_of
from varuna.partition.loss.whole_batch import SHARE
from varuna.partition.model import PartitionedModel

WeightFunction = Callable[[dict[str, Tensor]], float | Tensor]


def weight_of(
    model: PartitionedModel, weight: WeightFunction | None, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> float:
    """Return the weight of a batch: by the user's ``weight``, else in targets, else in examples.

    Args:
        model: with its declared lengths.
        weight: the user's ``weight(batch)``, if any.
        batch: collated samples; of none that are there, it counts nothing.
        buffers: those that counting targets needs, in host memory.
    """
    size = model.samples_in(batch)
    if not size:
        return 0.0
    if weight is not None:
        return float(weight(nested(batch)))
    model = model.graphs[variant_of(model, batch, ())]
    return float(size) if model.counter is None else _counted(model, model.counter, batch, buffers)


def counted_targets(model: PartitionedModel, batch: Mapping[str, Tensor]) -> float | None:
    """The number of a batch's targets, in host memory as its samples are; None: it follows from buffers, too.

    Args:
        model: one graph, which counts targets.
        batch: collated samples, some of which are there.
    """
    counter = model.counter
    return None if counter is None or counter.buffers else _counted(model, counter, batch, {})


def _counted(
    model: PartitionedModel, counter: SectionGraph, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> float:
    sizes = [model.samples_in(batch)] if counter.needs_batch_size else []
    fixed = [buffers[name] for name in counter.buffers] + [model.constants[name] for name in counter.constants]
    return float(counter.module(*[batch[key] for key in counter.inputs], *sizes, *fixed)[0])


def known_to(model: PartitionedModel, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers and constants from which numbers of the whole batch are computed, in host memory."""
    if model.whole is None:
        return {}
    counter, names = model.whole.counter, set(model.whole.fixed)
    names.update(() if counter is None else (*counter.buffers, *counter.constants))
    return {name: (buffers[name] if name in buffers else model.constants[name]).cpu() for name in names}


def numbers_of(
    model: PartitionedModel, parts: Sequence[Mapping[str, Tensor]], buffers: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Numbers of the whole batch for the sections, one dict for each part; empty if the loss needs none.

    Args:
        model: one graph.
        parts: collated samples, in host memory.
        buffers: at least those that the counts need.
    """
    whole = model.whole
    if whole is None:
        return [{} for _ in parts]
    known, sizes = known_to(model, buffers), [model.samples_in(part) for part in parts]
    rows = [whole.counts(part, known, size) for part, size in zip(parts, sizes, strict=True)]
    # fsum rounds once, so the order of parts does not matter
    numbers = whole.numbers([math.fsum(column) for column in zip(*rows, strict=True)], known)
    return [{**numbers, SHARE: torch.tensor(size / sum(sizes))} for size in sizes]


def completed(model: PartitionedModel, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch together with the numbers of the whole batch that sections need, where it is that batch."""
    (numbers,) = numbers_of(model, [{key: value.cpu() for key, value in batch.items()}], buffers)
    device = next(iter(batch.values())).device
    return {**batch, **{key: value.to(device) for key, value in numbers.items()}}
