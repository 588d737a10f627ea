"""What a micro-batch says about the loss: sums, because means of micro-batches must not be averaged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.nest import nested
from varuna.data.samples import MicroBatch
from varuna.engine.stage.section import Examples
from varuna.partition.batch_weight import WeightFunction
from varuna.partition.model import PartitionedModel


def sums_of(
    model: PartitionedModel,
    weigh: WeightFunction | None,
    micro_batch: int,
    results: Sequence[Tensor],
    examples: Examples,
    batch: MicroBatch | None,
    read: int,
    global_batch: int,
) -> list[float]:
    """[weighted loss, weight, metric sums...] from what the last section made of a micro-batch.

    Where the terms of a loss count different things, it is the micro-batch's part of the loss of ``global_batch``.

    Args:
        model: its last section has run.
        weigh: the user's weight of a micro-batch, if any.
        micro_batch: its global number, for the message.
        results: loss (scalar), number of targets (scalar) if they are counted, metric sums (scalars).
        examples: of the micro-batch.
        batch: its samples, if this rank reads them.
        read: samples that were read for it; not all of them may be there.
        global_batch: M, examples per step.

    Raises:
        DataError: the user's weight is negative or not finite.
    """
    loss, *others = _read(results)
    targets, sums = (others[0], others[1:]) if model.counts_targets else (float(examples.samples), others)
    if not examples.samples:  # a stand-in was computed
        weight, sums = 0.0, [0.0] * len(sums)
    elif weigh is not None and batch is not None:
        weight = float(weigh(nested(batch.tensors)))
    else:
        weight = targets
    if not 0 <= weight < float("inf"):
        raise DataError(f"the weight of micro-batch {micro_batch} is {weight}: weight(batch) must be finite and >= 0")
    if model.whole is not None:
        return [loss * global_batch if examples.samples else 0.0, float(read), *sums]
    weighted = loss * weight if weight else 0.0  # a mean over no targets is NaN and counts nothing
    return [weighted, weight, *sums]


def _read(values: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers; from a GPU in one transfer, since the host waits for each."""
    if not values[0].is_cuda:
        return [float(value.detach()) for value in values]
    found: list[float] = torch.stack([value.detach().reshape(()).double() for value in values]).tolist()
    return found
