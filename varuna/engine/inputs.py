"""From a micro-batch as it was read to what the sections of a stage are given."""

from collections.abc import Mapping

import torch

from varuna.data.samples import MicroBatch
from varuna.engine.section import Examples
from varuna.partition.inputs import InputLayout, check_inputs


def examples_of(
    batch: MicroBatch | None, size: int, layouts: Mapping[str, InputLayout], device: torch.device, variant: int = 0
) -> Examples:
    """The inputs of ``size`` examples on ``device``; none for a stage that reads no samples.

    Raises:
        DataError: a shape or dtype is not what the model was captured with.
    """
    if batch is None:
        return Examples({}, size, variant)
    check_inputs(layouts, batch.tensors, batch.indices)
    return Examples({key: value.to(device) for key, value in batch.tensors.items()}, size, variant)
