"""Branches on the samples themselves: captured as the first samples take them, and checked for every batch.

``if mask.any():`` is a branch on data that follows from the inputs alone. Capture takes the way of the first samples;
what it took for granted becomes a small graph from inputs to truths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from varuna.core.errors import DataError


@dataclass(frozen=True)
class Conditions:
    """Conditions that every batch must meet."""

    module: GraphModule
    """``(*inputs, *buffers, *constants) -> truths``"""
    inputs: tuple[str, ...]
    """keys of the batch"""
    buffers: tuple[str, ...]
    """the model's own names"""
    constants: tuple[Tensor, ...]
    places: tuple[str, ...]
    """file and line of each branch"""


def check_conditions(
    conditions: Conditions | None, batch: Mapping[str, Tensor], indices: Sequence[int], buffers: Mapping[str, Tensor]
) -> None:
    """Compare a batch with what the capture took for granted.

    Args:
        conditions: of the model.
        batch: collated samples.
        indices: of the samples in the dataset, for the message.
        buffers: by name.

    Raises:
        DataError: a branch goes the other way.
    """
    if conditions is None:
        return
    given = [batch[key] for key in conditions.inputs]
    held = [buffers[name].cpu() for name in conditions.buffers]  # samples are looked at before they go to a device
    truths = conditions.module(*given, *held, *conditions.constants)
    for place, truth in zip(conditions.places, truths, strict=True):
        if not truth:
            raise DataError(
                f"forward() branches on the samples at {place}, and the batch of dataset indices {list(indices)} "
                "takes another branch than the first samples of the run, for which it was captured. Make all "
                "micro-batches alike in this respect (all padded, or none), or write the branch as tensor "
                "operations."
            )
