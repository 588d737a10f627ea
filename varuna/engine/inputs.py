"""From a micro-batch as it was read to what the sections of a stage are given."""

from collections.abc import Mapping

from varuna.data.samples import MicroBatch
from varuna.engine.lanes import Lane
from varuna.engine.section import Examples
from varuna.partition.inputs import InputLayout, check_inputs


def examples_of(
    batch: MicroBatch | None, size: int, layouts: Mapping[str, InputLayout], lane: Lane, variant: int = 0
) -> Examples:
    """The inputs of ``size`` examples, by ``lane``; none for a stage that reads no samples.

    Raises:
        DataError: a shape or dtype is not what the model was captured with.
    """
    if batch is None:
        return Examples({}, size, variant)
    check_inputs(layouts, batch.tensors, batch.indices)
    return Examples(lane.up(batch.tensors), size, variant)
