"""The loss of another dataset, forward only, over the stages and replicas of the running generation.

Nothing that training depends on is touched: parameters are read, graphs and links are its own, randomness is seeded
before every use anyway. All ranks take part, between two steps; if the generation ends meanwhile, the evaluation does.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.data.loader import Loader
from varuna.data.samples import MicroBatch, SampleSource
from varuna.engine.links.message import Layout
from varuna.engine.pipeline.forward_pass import EVALUATION, Arrived, ForwardPass
from varuna.engine.stage.losses import Losses
from varuna.engine.stage.section import flow_on
from varuna.engine.worker.generation import Generation
from varuna.partition.batch_weight import WeightFunction
from varuna.partition.cut.split import Crossing
from varuna.partition.model import PartitionedModel

_AHEAD = 8
"""Micro-batches per stage between two meetings of all ranks: bounds what a fast stage sends ahead of a slow one."""


class EvaluationSums(NamedTuple):
    """Sums over all examples of an evaluation; the same numbers on every rank and in every plan."""

    loss: float
    """weighted mean"""
    weight: float
    metrics: dict[str, float]


class EvaluationWork(NamedTuple):
    """An evaluation to run: model, buffers, samples, number of examples, weights."""

    number: int
    """of this evaluation in this process: nothing that ranks exchange depends on it"""
    model: PartitionedModel
    """in evaluation mode, for the job's device"""
    buffers: Mapping[str, Tensor]
    """those that training does not have"""
    source: SampleSource
    examples: int
    weigh: WeightFunction | None
    averaged: bool = False
    """with averages of the parameters in their place"""


def evaluate(generation: Generation, work: EvaluationWork) -> EvaluationSums:
    """Run every example once; all ranks of the grid call this at the same step.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke, or nothing came within the bound.
        DataError: a sample is not what the model was captured with, or differs between stages.
    """
    with closing(EvaluationRun(generation, work)) as evaluation:
        return evaluation.run()


class EvaluationRun:
    """A rank's part of an evaluation."""

    def __init__(self, generation: Generation, work: EvaluationWork) -> None:
        plan, rank = generation.plan, generation.assignment.rank
        self.generation, self.work, self.stage = generation, work, generation.stage
        # As one large step: the plan's own division gives each replica its micro-batches.
        self.plan: Plan = plan.model_copy(update={"global_batch": work.examples})
        self._mine = self.plan.micro_batches_of(generation.replica)
        self.chunk = _AHEAD * plan.stages
        # Of any replica: all ranks come to as many meetings, with nothing to bring at the end.
        self._longest = max(len(self.plan.micro_batches_of(replica)) for replica in range(plan.replicas))
        buffers = {**work.buffers, **self._foreign_buffers()}
        self._runners = [
            self.stage.evaluation_runners(graph, buffers, averaged=work.averaged) for graph in work.model.graphs
        ]
        known = {**self.stage.job.buffers, **buffers}
        self._forward_pass = ForwardPass(
            self.stage,
            self.plan,
            rank,
            model=work.model,
            buffers=known,
            groups=generation.groups,
            inbox=generation.inbox,
            source=work.source,
            weight=work.weigh,
            steps=range(work.number, work.number + 1),
            purpose=EVALUATION,
        )
        self._whole = self._forward_pass.whole

    def _foreign_buffers(self) -> dict[str, Tensor]:
        """Get the newest statistics that a section reads and another stage updates (a normalisation used twice)."""
        trained, stage = self.stage.job, self.stage
        owners = {name: section.index for section in trained.model.sections for name in section.updated}
        shared = {
            name: trained.buffers[name]
            for graph in self.work.model.graphs
            for section in graph.sections
            for name in section.buffers
            if owners.get(name, section.index) != section.index
        }
        if not shared or self.plan.workers == 1:
            return {}
        crossings = [
            Crossing(name, value.dtype, tuple(value.shape), (0,) * value.dim(), differentiable=False)
            for name, value in sorted(shared.items())
        ]
        layout = Layout(tuple(crossings), 1, digests=False)
        speaks = self.generation.replica == 0  # one writer for each byte: adding words is exact
        own = {name: stage.buffers[name] for name in shared if speaks and owners[name] in stage.sections}
        table = layout.pack(own, copies=stage.job.traffic.links).whole()
        words = table.view(torch.int64)
        self.sum_all("buffers", words, "the running statistics of other stages, in an evaluation")
        return layout.unpack(table, stage.job.traffic.links)

    # -- the run -------------------------------------------------------------------------------------------

    def run(self) -> EvaluationSums:
        """Run all chunks; after each, the ranks meet."""
        if self._whole.used:
            self._count()
        rows = [self._meet(first, self._losses(chunk)) for first, chunk in self.chunks()]
        return _summed(torch.cat(rows), self.work.model.metrics)

    def chunks(self) -> Iterator[tuple[int, list[int]]]:
        """Yield this replica's micro-batches between two meetings, and how many came before; as often on every rank."""
        self._forward_pass.request(self.work.number)
        for first in range(0, self._longest, self.chunk):
            yield first, list(self._mine[first : first + self.chunk])
            self.stage.truths.check(self.work.source, self.plan, 0)

    def _count(self) -> None:
        """Count all examples: where loss terms count different things, those samples are read twice."""
        work = self.work
        counters = [graph.whole.counter for graph in work.model.graphs if graph.whole is not None]
        keys = [key for counter in counters if counter is not None for key in counter.inputs]
        loader: Loader

        def deliver(number: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
            try:
                self._whole.count_micro_batch(number, micro_batch, batch)
            except Exception as error:  # noqa: BLE001 - its forward says so too; a silent loader would hang the count
                self._whole.count_micro_batch(number, micro_batch, error)
            loader.taken()

        if self._whole.counts:
            loader = Loader(work.source, deliver=deliver)
            wanted = [(micro_batch, list(self.plan.samples_of(micro_batch))) for micro_batch in self._mine]
            loader.request(work.number, wanted, (*keys, *work.model.telling_keys))
        try:
            what = "what the other ranks counted for an evaluation"
            self._whole.begin(work.number, lambda table: self.sum_all("counts", table, what))
            self._whole.wait_for_others(lambda: None)
        finally:
            if self._whole.counts:
                loader.close(timeout_s=0.0)

    def forward(self, micro_batch: int) -> tuple[tuple[Tensor, ...], Arrived]:
        """Run a micro-batch through this stage; return what the last one makes, and of what; nothing on others."""
        work, made = self.work, tuple[Tensor, ...]()
        arrived = self._forward_pass.take_inputs(work.number, micro_batch)
        flowing, variant = arrived.values, arrived.examples.variant
        for runner in self._runners[variant]:
            made = runner.forward(flowing, arrived.examples, 0, micro_batch)
            flowing = flow_on(work.model.graphs[variant], flowing, runner, made)
        if self.stage.is_last:
            return made, arrived
        self._forward_pass.hand_on(work.number, micro_batch, flowing, arrived)
        return (), arrived

    def _losses(self, chunk: Sequence[int]) -> list[list[float]]:
        losses = Losses(len(chunk), self.stage.job.traffic.links)
        for micro_batch in chunk:
            made, arrived = self.forward(micro_batch)
            if self.stage.is_last:
                losses.add(micro_batch, self._forward_pass.sums(micro_batch, made, arrived))
        return list(losses.numbers().values())

    def _meet(self, first: int, found: Sequence[Sequence[float]]) -> Tensor:
        """Exchange sums of a chunk by replica and micro-batch; each has one writer, so adding is exact."""
        width = 2 + len(self.work.model.metrics)
        table = torch.zeros(self.plan.replicas, self.chunk, width, dtype=torch.float64)
        for position, values in enumerate(found):
            table[self.generation.replica, position] = torch.tensor(values, dtype=torch.float64)
        self.sum_all("sums", table, f"the sums of an evaluation (from micro-batch {first} on)")
        return table.view(-1, width)

    def close(self) -> None:
        """Let the threads end, and the processes that read."""
        self._forward_pass.close()
        self.work.source.close()

    def sum_all(self, kind: str, table: Tensor, what: str) -> None:
        """Sum over all ranks, in place."""
        self.generation.reducer.sum_over_grid((f"evaluation's {kind}", self.work.number), table, what)


def _summed(rows: Tensor, metrics: Sequence[str]) -> EvaluationSums:
    columns = [math.fsum(column) for column in rows.t().tolist()]
    weighted, weight, *sums = columns
    return EvaluationSums(weighted / weight if weight else 0.0, weight, dict(zip(metrics, sums, strict=True)))
