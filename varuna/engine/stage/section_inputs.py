"""From a micro-batch as it was read to the inputs of a stage's sections."""

from collections.abc import Mapping

from torch import Tensor

from varuna.data.samples import MicroBatch
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.stage.section import Examples
from varuna.partition.batch_layout import InputLayout, check_inputs


def examples_of(
    batch: MicroBatch | None,
    size: int,
    layouts: Mapping[str, InputLayout],
    copies: HostCopies,
    variant: int = 0,
    numbers: Mapping[str, Tensor] | None = None,
) -> Examples:
    """The inputs of ``size`` examples and ``numbers`` of the whole batch, by ``copies``.

    A stage that reads no samples has none of the former.

    Args:
        batch: the micro-batch as it was read; tensors are in host memory, and their first dimension counts examples.
        size: its number of examples.
        layouts: what the graph was captured with, by key.
        copies: of samples to the device.
        variant: the graph for its length.
        numbers: of the whole batch, scalars by key.

    Raises:
        DataError: a shape or dtype is not what the model was captured with.
    """
    given = dict(numbers or {})
    if batch is not None:
        check_inputs(layouts, batch.tensors, batch.indices)
        given.update(batch.tensors)
    return Examples(copies.up(given) if given else {}, size, variant)
