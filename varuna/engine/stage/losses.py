"""What micro-batches say about the loss: sums, because means of micro-batches must not be averaged.

To read a number from a GPU waits for it, and meanwhile nothing is launched. So what a GPU computed stays there until
the vote, in one table; how much a micro-batch counts, which its backward needs, is counted on the host.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.core.sums import MicroBatchLoss
from varuna.data.nest import nested
from varuna.data.samples import MicroBatch
from varuna.engine.device.host_copies import CPU_COPIES, DONE, HOST, HostCopies, Ready
from varuna.engine.stage.section import Examples
from varuna.partition.batch_weight import WeightFunction, counted_targets
from varuna.partition.model import PartitionedModel


class LossSums(NamedTuple):
    """What the last section made of a micro-batch, and how it counts."""

    results: Sequence[Tensor]
    """scalars on the device: loss, then metric sums"""
    factor: float
    """of the loss in the sum over the batch, and so the gradient of that sum with respect to the loss"""
    weight: float
    is_there: bool
    """False: a stand-in was computed, since no sample of it was read"""

    def numbers(self, row: Sequence[float]) -> list[float]:
        """[weighted loss, weight, metric sums...] from the results as numbers."""
        loss, *sums = row
        weighted = loss * self.factor if self.factor else 0.0  # a mean over no targets is NaN and counts nothing
        return [weighted, self.weight, *(sums if self.is_there else [0.0] * len(sums))]


def sums_of(
    model: PartitionedModel,
    weigh: WeightFunction | None,
    micro_batch: int,
    results: Sequence[Tensor],
    examples: Examples,
    batch: MicroBatch | None,
    read: int,
    global_batch: int,
) -> LossSums:
    """What a micro-batch says about the loss of its batch.

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
    loss, *sums = results
    targets = sums.pop(0) if model.counts_targets else None
    if not examples.samples:  # a stand-in was computed
        weight = 0.0
    elif weigh is not None and batch is not None:
        weight = float(weigh(nested(batch.tensors)))
    elif targets is None:
        weight = float(examples.samples)
    else:
        on_host = None if targets.device == HOST or batch is None else counted_targets(model, batch.tensors)
        weight = float(targets.detach()) if on_host is None else on_host
    if not 0 <= weight < float("inf"):
        raise DataError(f"the weight of micro-batch {micro_batch} is {weight}: weight(batch) must be finite and >= 0")
    is_there = examples.samples > 0
    if model.whole is not None:
        return LossSums((loss, *sums), float(global_batch * is_there), float(read), is_there)
    return LossSums((loss, *sums), weight, weight, is_there)


class Losses:
    """Losses of micro-batches of one step on one rank, or of some of an evaluation; any thread may ask for numbers."""

    def __init__(self, rows: int, copies: HostCopies = CPU_COPIES, known: Iterable[MicroBatchLoss] = ()) -> None:
        """Begin with what is known already.

        Args:
            rows: most that will be added.
            copies: from the device.
            known: of micro-batches that do not run again.
        """
        self._rows, self._copies, self._lock = rows, copies, threading.Lock()
        self._known = {each.micro_batch: list(each.values) for each in known}
        self._added: list[tuple[int, LossSums]] = []
        self._read = 0
        """so many of them are known"""
        self._table: Tensor | None = None
        self._last: Ready = DONE
        """until then the last row is not there"""

    def add(self, micro_batch: int, sums: LossSums) -> None:
        """Add what a micro-batch says, by the thread that computes."""
        results = [value.detach().reshape(()).double() for value in sums.results]
        if self._table is None:
            self._table = results[0].new_empty(self._rows, len(results))
        torch.stack(results, out=self._table[len(self._added)])
        with self._lock:
            self._added.append((micro_batch, sums._replace(results=())))
            self._last = self._copies.point()

    def numbers(self) -> dict[int, list[float]]:
        """[weighted loss, weight, metric sums...] of each micro-batch so far; waits for a GPU, without the lock."""
        with self._lock:
            first, added, last = self._read, self._added[self._read :], self._last
        found = dict[int, list[float]]()
        if added:
            assert self._table is not None
            rows = self._table[first : first + len(added)]
            room = self._copies.room_for(rows)
            self._copies.down([(rows, room)], last).wait()
            found = {number: sums.numbers(row) for (number, sums), row in zip(added, room.tolist(), strict=True)}
        with self._lock:
            self._known.update(found)
            self._read = max(self._read, first + len(added))
            return dict(self._known)
