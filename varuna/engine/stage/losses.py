"""Sums in which micro-batches report the loss, because means of micro-batches must not be averaged.

To read a number from a GPU waits for it, and meanwhile nothing is launched. So what a GPU computed comes to the host by
itself, and no thread waits for it before the vote; how much a micro-batch counts, which its backward needs, is counted
on the host.
"""

import threading
from collections.abc import Iterable, Sequence
from itertools import takewhile
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
    """The last section's results for a micro-batch, and their weight."""

    results: Sequence[Tensor]
    """scalars on the device: loss, then metric sums"""
    factor: float
    """of the loss in the sum over the batch, and so the gradient of that sum with respect to the loss"""
    weight: float
    is_there: bool
    """False: a stand-in was computed, since no sample of it was read"""

    def numbers(self, row: Sequence[float]) -> list[float]:
        """Return [weighted loss, weight, metric sums...] from the results as numbers."""
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
    """Return what a micro-batch contributes to the loss of its batch.

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
        # Counted again on the host, from the samples: reading the device's count would wait for the GPU before each B.
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
        self._added: list[tuple[int, LossSums, list[float] | Tensor, Ready]] = []
        self._table = torch.empty(0)

    def add(self, micro_batch: int, sums: LossSums) -> None:
        """Add what a micro-batch says, by the thread that computes; it is on its way to the host then."""
        row: list[float] | Tensor
        there: Ready = DONE
        if self._copies is CPU_COPIES:  # they are there already, and a table of them would cost more than the rest
            row = [value.item() for value in sums.results]
        else:
            row, there = self._sent([value.detach() for value in sums.results])
        with self._lock:
            self._added.append((micro_batch, sums._replace(results=()), row, there))

    def _sent(self, results: Sequence[Tensor]) -> tuple[Tensor, Ready]:
        """Begin one copy of all results, as float64, as in the vote (core.vote)."""
        row = torch.stack([value.reshape(()).double() for value in results])
        if not self._table.numel():
            self._table = self._copies.room(self._rows * row.nbytes).view(row.dtype).view(self._rows, -1)
        place = self._table[len(self._added)]
        return place, self._copies.copy_to_host([(row, place)])

    def numbers(self, *, now: bool = False) -> dict[int, list[float]]:
        """Return [weighted loss, weight, metric sums...] of each micro-batch so far.

        Args:
            now: without waiting for a GPU, which may hang: of those that are on the host.
        """
        with self._lock:
            added = list(self._added)
        if now:
            # Copies end in the order in which they began: the first that has not ends the list.
            added = list(takewhile(lambda each: each[3].passed(), added))
        elif added:
            added[-1][3].wait()  # they come in order
        return self._known | {
            number: sums.numbers(row.tolist() if isinstance(row, Tensor) else row) for number, sums, row, _ in added
        }
