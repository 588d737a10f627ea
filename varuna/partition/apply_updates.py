"""The new values of buffers after a step: updates of sections, applied to statistics of its micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.partition.cut.buffers import Kind
from varuna.partition.cut.split import BufferUpdate


class MicroBatchStatistics(NamedTuple):
    """Statistics of one micro-batch."""

    examples: int
    statistics: Mapping[str, Tensor]


def apply_updates(
    updates: Iterable[BufferUpdate], buffers: Mapping[str, Tensor], found: Sequence[MicroBatchStatistics]
) -> None:
    """Write the new values of buffers in place.

    Args:
        updates: of one or several sections.
        buffers: by name.
        found: by all micro-batches of the step, in order.
    """
    with torch.no_grad():
        for update in updates:
            rows = found if update.kinds is None else [_whole(update, found)]
            batch = [] if update.kinds is None else [rows[0].examples]
            for row in rows:
                given = [buffers[name] for name in update.buffers] + [
                    row.statistics[name] for name in update.statistics
                ]
                for name, value in zip(update.buffers, update.module(*given, *batch), strict=True):
                    buffers[name].copy_(value)


def _whole(update: BufferUpdate, found: Sequence[MicroBatchStatistics]) -> MicroBatchStatistics:
    """Combine the statistics of micro-batches into those of the whole batch."""
    examples = sum(each.examples for each in found)
    made = {
        name: _combined(kind, [(each.examples / examples, each.statistics.get(name)) for each in found])
        for name, kind in zip(update.statistics, update.kinds or (), strict=True)
    }
    return MicroBatchStatistics(examples, made)


def _combined(kind: Kind, parts: Sequence[tuple[float, Tensor | None]]) -> Tensor:
    """Combine pairs ``(share of the examples, value)``; what is the same in all is with the first, at least."""
    values = [value for _, value in parts if value is not None]
    if kind == "same" or len(values) == 1:
        return values[0]
    if kind == "rows":
        return torch.cat(values)
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = torch.zeros_like(values[0], dtype=wide)
    # in the order of micro-batches, whichever replicas ran them: another order would round differently
    for share, value in parts:
        assert value is not None
        total += value.to(wide) if kind == "sum" else value.to(wide) * share
    return total.to(dtype)
