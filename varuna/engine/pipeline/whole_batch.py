"""Numbers of the whole batch on one rank: counted as samples are read, added up over the ranks, given to sections.

The last stage of each replica counts its micro-batches before its first forward of a step, so it reads a step's samples
ahead. Each slot of the table has one writer and columns are added up exactly: no plan changes a number.
"""

import math
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.data.samples import MicroBatch
from varuna.data.sizes import PREFIX
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Awaited
from varuna.partition.batch_weight import known_to
from varuna.partition.lengths import variant_of
from varuna.partition.loss.whole_batch import SHARE
from varuna.partition.model import PartitionedModel

AddUp = Callable[[Tensor], None]


class GlobalCounts:
    """The numbers of one rank in one generation, or in one evaluation."""

    def __init__(
        self,
        model: PartitionedModel,
        buffers: Mapping[str, Tensor],
        plan: Plan,
        rank: int,
        inbox: Inbox,
        *,
        may_miss: bool = False,
    ) -> None:
        """Begin with nothing counted.

        Args:
            model: in the mode that runs.
            buffers: at least those that counts need.
            plan: whose global batch is the whole batch.
            rank: this one.
            inbox: stirred when something has been counted.
            may_miss: micro-batches may have fewer samples than the plan says.
        """
        self._model, self._plan, self._inbox = model, plan, inbox
        self.used = model.whole is not None
        """False: the terms of the loss count one thing, and nothing here is needed"""
        place = plan.place_of(rank)
        self._leaves = () if model.whole is None else model.whole.leaves
        self._mine = plan.micro_batches_of(place.replica)
        self._known = [known_to(graph, buffers) for graph in model.graphs] if self.used else []
        pipeline = plan.pipeline_of(place.replica)
        last = pipeline.stages - 1
        readers = {pipeline.stage_of(section) for section in range(plan.sections) if self._reads(section)}
        self.reads = place.stage in readers
        """sections of this rank are given numbers"""
        counters = [graph.whole.counter for graph in model.graphs if graph.whole is not None]
        self._counts_samples = self.used and (
            len(model.graphs) > 1 or may_miss or any(counter is not None and counter.inputs for counter in counters)
        )  # else all follows from how many examples a micro-batch has, which the plan says
        self.counts = self._counts_samples and place.stage == last
        """this rank counts the micro-batches of its replica"""
        # With one replica whose last stage alone reads the counts, its own are all there are.
        self._exchanged = self._counts_samples and (plan.replicas > 1 or not readers <= {last})
        self._table: Tensor | None = None  # on its way
        self._rows: dict[int, dict[int, list[float]]] = {}
        self._lock = threading.Lock()
        self._numbers: list[dict[str, Tensor]] = []
        self._samples = 0.0

    def _reads(self, section: int) -> bool:
        return any(key.startswith(PREFIX) for graph in self._model.graphs for key in graph.sections[section].inputs)

    @property
    def ahead(self) -> int:
        """Micro-batches that must be read before the first forward."""
        return len(self._mine) if self.counts else 0

    def count_micro_batch(self, step: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
        """Count a micro-batch; one that could not be read is reported by its forward.

        Raises:
            DataError: its length was not declared.
        """
        if not self.counts:
            return
        row: list[float] = []
        try:
            if isinstance(batch, MicroBatch):
                variant = variant_of(self._model, batch.tensors, batch.indices)
                whole = self._model.graphs[variant].whole
                assert whole is not None, "all lengths count alike"
                size = self._model.samples_in(batch.tensors)
                row = [*whole.counts(batch.tensors, self._known[variant], size), float(size)]
        finally:
            with self._lock:
                # An empty row for one that could not be read: it is counted as there, or ``begin`` would wait for ever.
                self._rows.setdefault(step, {})[micro_batch] = row
            self._inbox.stir()

    def begin(self, step: int, add_up: AddUp) -> None:
        """Wait until this rank has counted its micro-batches of a step, if it does, and start to add them up.

        Args:
            step: or number of the evaluation.
            add_up: starts to sum a table over the grid, in place.

        Raises:
            GenerationEnded: the manager ended the generation.
        """
        if self._model.whole is None or (self._numbers and not self._counts_samples):
            return  # sizes alone are counted: the numbers of the first step are those of all
        if self.counts:
            self._inbox.wait(lambda: self._is_counted(step), lambda: Awaited(f"the samples of step {step}, to count"))
        with self._lock:
            rows = self._rows.pop(step, {})
            for old in [each for each in self._rows if each < step]:
                del self._rows[old]
        self._table = torch.zeros(self._plan.micro_batches, self._model.whole.width + 1, dtype=torch.float64)
        for micro_batch, row in rows.items():
            if row:
                self._table[micro_batch] = torch.tensor(row, dtype=torch.float64)
        if self._exchanged:
            add_up(self._table)

    def wait_for_others(self, added_up: Callable[[], None]) -> None:
        """Wait for the counts of the other ranks, unless that is done: ``numbers`` are then those of the step.

        Args:
            added_up: waits for the sum.

        Raises:
            GenerationEnded: the manager ended the generation.
            LinkError: a rank is gone.
        """
        if self._table is None:
            return
        if self._exchanged:
            added_up()
        if not self._counts_samples:
            self._count_sizes(self._table)
        *totals, self._samples = (math.fsum(column) for column in self._table.t().tolist())
        self._table = None
        self._numbers = [
            {} if graph.whole is None else graph.whole.numbers(totals, known)
            for graph, known in zip(self._model.graphs, self._known, strict=True)
        ]

    def _count_sizes(self, table: Tensor) -> None:
        whole = self._model.whole
        assert whole is not None
        for micro_batch in range(self._plan.micro_batches):
            size = len(self._plan.samples_of(micro_batch))
            table[micro_batch] = torch.tensor([*whole.counts({}, self._known[0], size), float(size)])

    def _is_counted(self, step: int) -> bool:
        with self._lock:
            return len(self._rows.get(step, ())) == len(self._mine)

    def numbers(self, variant: int, size: int) -> dict[str, Tensor]:
        """Return the numbers that sections are given for a micro-batch of ``size`` examples."""
        if not self.reads:
            return {}
        return {**self._numbers[variant], SHARE: torch.tensor(size / (self._samples or 1.0))}
