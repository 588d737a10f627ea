"""The loss of another dataset, forward only, over the stages and replicas of the running generation.

Nothing that training depends on is touched: parameters are read, graphs and links are its own, randomness is seeded
before every use anyway. All ranks take part, between two steps; if the generation ends meanwhile, the evaluation does.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.data.loader import Loader
from varuna.data.samples import MicroBatch, SampleSource, verify_digests
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.links.links import Courier, Receiver, Sender
from varuna.engine.links.message import Layout
from varuna.engine.pipeline.length_variants import Variants
from varuna.engine.pipeline.whole_batch import WholeBatch
from varuna.engine.stage.losses import sums_of
from varuna.engine.stage.section_inputs import examples_of
from varuna.engine.stage.stage import flow_on
from varuna.engine.worker.generation import Generation
from varuna.partition.batch_weight import WeightFunction
from varuna.partition.cut.split import Crossing
from varuna.partition.graph.sample_guards import check_conditions
from varuna.partition.model import PartitionedModel

_TAG = 3
_AHEAD = 8
"""Micro-batches per stage between two meetings of all ranks: bounds what a fast stage sends ahead of a slow one."""


class EvaluationSums(NamedTuple):
    """Sums over all examples of an evaluation; the same numbers on every rank and in every plan."""

    loss: float
    """weighted mean"""
    weight: float
    metrics: dict[str, float]


class EvaluationWork(NamedTuple):
    """What to evaluate: model, buffers, samples, number of examples, weights."""

    number: int
    """of this evaluation in this process: nothing that ranks exchange depends on it"""
    model: PartitionedModel
    """in evaluation mode, for the job's device"""
    buffers: Mapping[str, Tensor]
    """those that training does not have"""
    source: SampleSource
    examples: int
    weigh: WeightFunction | None


def evaluate(generation: Generation, work: EvaluationWork) -> EvaluationSums:
    """Run every example once; all ranks of the grid call this at the same step.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke, or nothing came within the bound.
        DataError: a sample is not what the model was captured with, or differs between stages.
    """
    with closing(Courier(generation.inbox, f"evaluation {work.number}")) as courier:
        pipeline = _Pipeline(generation, work, courier)
        try:
            return pipeline.run()
        finally:
            pipeline.close()


class _Pipeline:
    """One rank's part of an evaluation."""

    def __init__(self, generation: Generation, work: EvaluationWork, courier: Courier) -> None:
        plan, rank = generation.plan, generation.assignment.rank
        self._generation, self._work, self._rank = generation, work, rank
        self._inbox, self._stage = generation.inbox, generation.stage
        self._plan: Plan = plan.model_copy(update={"global_batch": work.examples})
        self._mine = self._plan.micro_batches_of(generation.replica)
        self._chunk = _AHEAD * plan.stages
        self._longest = max(len(self._plan.micro_batches_of(replica)) for replica in range(plan.replicas))
        self._courier = courier
        buffers = {**work.buffers, **self._foreign_buffers()}
        self._runners = [self._stage.evaluation_runners(graph, buffers) for graph in work.model.graphs]
        self._variants = Variants(work.model, self._inbox)
        self._keys = self._input_keys()
        reads = self._keys is None or bool(self._keys)
        self._whole = WholeBatch(work.model, {**self._stage.job.buffers, **buffers}, self._plan, rank, self._inbox)
        self._loader = Loader(work.source, deliver=self._deliver) if reads else None
        self._downstream = self._open_links()

    def _input_keys(self) -> tuple[str, ...] | None:
        if self._stage.is_last and self._work.weigh is not None:
            return None
        return self._work.model.keys_of(self._stage.sections)

    def _foreign_buffers(self) -> dict[str, Tensor]:
        """Newest values of statistics that a section reads and another stage updates (a normalisation used twice)."""
        trained, stage = self._stage.job, self._stage
        owners = {name: section.index for section in trained.model.sections for name in section.updated}
        shared = {
            name: trained.buffers[name]
            for graph in self._work.model.graphs
            for section in graph.sections
            for name in section.buffers
            if owners.get(name, section.index) != section.index
        }
        group = self._generation.groups.vote
        if not shared or group is None:
            return {}
        crossings = [
            Crossing(name, value.dtype, tuple(value.shape), (0,) * value.dim(), differentiable=False)
            for name, value in sorted(shared.items())
        ]
        layout = Layout(tuple(crossings), 1, digests=False)
        speaks = self._generation.replica == 0  # one writer for each byte: adding words is exact
        own = {name: stage.buffers[name] for name in shared if speaks and name in stage.buffers}
        table = layout.pack(own, copies=stage.job.traffic.links).whole()
        key = ("evaluation's buffers", self._work.number)
        self._courier.submit(key, lambda: group.all_reduce(table.view(torch.int64)))
        self._take(key, "the running statistics of other stages, in an evaluation")
        return layout.unpack(table, stage.job.traffic.links)

    def _open_links(self) -> Sender | None:
        rank, world = self._rank, self._generation.groups.world
        if self._stage.index > 0:
            name = f"of rank {rank} with rank {rank - 1} (stage {self._stage.index - 1}) in an evaluation"
            Receiver(world, rank - 1, _TAG, self._inbox, name, self._expected(), self._stage.job.traffic.links)
        if self._stage.is_last:
            return None
        name = f"of rank {rank} with rank {rank + 1} (stage {self._stage.index + 1}) in an evaluation"
        return Sender(world, rank + 1, _TAG, self._inbox, name)

    def _expected(self) -> Iterator[tuple[tuple[str, int, int], int]]:
        for micro_batch in self._mine:
            if not self._variants.wait(self._work.number, micro_batch):
                return
            yield self._key("activation", micro_batch), self._layout(micro_batch, self._stage.sections.start).size_bytes

    def _key(self, kind: str, micro_batch: int) -> tuple[str, int, int]:
        return (f"evaluation's {kind}", self._work.number, micro_batch)

    def _layout(self, micro_batch: int, section: int) -> Layout:
        graph = self._work.model.graphs[self._variants.of(self._work.number, micro_batch)]
        return Layout(graph.split.crossings[section], len(self._plan.samples_of(micro_batch)), digests=True)

    def _deliver(self, number: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
        found: MicroBatch | BaseException = batch
        if isinstance(batch, MicroBatch):
            try:
                self._variants.note(number, micro_batch, batch)
            except Exception as error:  # noqa: BLE001 - for the thread that needs it; a silent loader would hang it
                found = error
        self._inbox.put(self._key("samples", micro_batch), found)

    # -- the run -------------------------------------------------------------------------------------------

    def run(self) -> EvaluationSums:
        """Run all chunks; after each, the ranks meet."""
        if self._whole.used:
            self._count()
        if self._loader is not None:
            wanted = [(micro_batch, list(self._plan.samples_of(micro_batch))) for micro_batch in self._mine]
            self._loader.request(self._work.number, wanted, self._keys)
        rows: list[Tensor] = []
        for first in range(0, self._longest, self._chunk):
            rows.append(self._meet(first, [self._forward(j) for j in self._mine[first : first + self._chunk]]))
        return _summed(torch.cat(rows), self._work.model.metrics)

    def _count(self) -> None:
        """Numbers of all examples: where loss terms count different things, those samples are read twice."""
        work = self._work
        counters = [graph.whole.counter for graph in work.model.graphs if graph.whole is not None]
        keys = [key for counter in counters if counter is not None for key in counter.inputs]
        loader: Loader

        def deliver(number: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
            try:
                self._whole.note(number, micro_batch, batch)
            except Exception as error:  # noqa: BLE001 - its forward says so too; a silent loader would hang the count
                self._whole.note(number, micro_batch, error)
            loader.taken()

        if self._whole.counts:
            loader = Loader(work.source, deliver=deliver)
            wanted = [(micro_batch, list(self._plan.samples_of(micro_batch))) for micro_batch in self._mine]
            loader.request(work.number, wanted, (*keys, *work.model.length_keys[:1]))
        try:
            self._whole.begin(work.number, self._add_up)
            self._whole.settle(self._added_up)
        finally:
            if self._whole.counts:
                loader.close(timeout_s=0.0)

    def _add_up(self, table: Tensor) -> None:
        group, key = self._generation.groups.vote, ("evaluation's counts", self._work.number)
        if group is None:
            self._inbox.put(key, None)
        else:
            self._courier.submit(key, lambda: group.all_reduce(table))

    def _added_up(self) -> None:
        key = ("evaluation's counts", self._work.number)
        self._take(key, "what the other ranks counted for an evaluation")

    def _forward(self, micro_batch: int) -> list[float]:
        """One micro-batch through this stage; its sums, on the last one."""
        work, stage, digests = self._work, self._stage, list[int]()
        copies = stage.job.traffic.links
        batch: MicroBatch | None = None
        if self._loader is not None:
            batch = self._inbox.take(
                self._key("samples", micro_batch),
                lambda: Awaited(f"the samples of micro-batch {micro_batch} of an evaluation"),
            )
            self._loader.taken()
        variant = self._variants.of(work.number, micro_batch)
        graph = work.model.graphs[variant]
        flowing: dict[str, Tensor] = {}
        if stage.index > 0:
            buffer = self._inbox.take(
                self._key("activation", micro_batch),
                lambda: Awaited(f"the activation of micro-batch {micro_batch} of an evaluation", (self._rank - 1,)),
            )
            layout = self._layout(micro_batch, stage.sections.start)
            flowing, digests = layout.unpack(buffer, copies), layout.digests_of(buffer)
            if batch is not None and any(digests):
                verify_digests(batch, digests, who=f"an earlier stage (below stage {stage.index})")
        if batch is not None and stage.index == 0:
            check_conditions(graph.conditions, batch.tensors, batch.indices, {**stage.job.buffers, **work.buffers})
        size = len(self._plan.samples_of(micro_batch))
        numbers = self._whole.numbers(variant, size)
        examples = examples_of(batch, size, graph.inputs, copies, variant, numbers)
        made: tuple[Tensor, ...] = ()
        for runner in self._runners[variant]:
            made = runner.forward(flowing, examples, 0, micro_batch)
            flowing = flow_on(graph, flowing, runner, made)
        if self._downstream is None:
            return sums_of(work.model, work.weigh, micro_batch, made, examples, batch, work.examples)
        out = self._layout(micro_batch, stage.sections.stop)
        self._downstream.send(out.pack(flowing, list(batch.digests) if batch else digests, copies))
        return []

    def _meet(self, first: int, found: Sequence[Sequence[float]]) -> Tensor:
        """Sums of a chunk by replica and micro-batch, on all ranks; each has one writer, so adding is exact."""
        width = 2 + len(self._work.model.metrics)
        table = torch.zeros(self._plan.replicas, self._chunk, width, dtype=torch.float64)
        for position, values in enumerate(found):
            if values:
                table[self._generation.replica, position] = torch.tensor(values, dtype=torch.float64)
        self._stage.truths.check(self._work.source, self._plan, 0)
        group = self._generation.groups.vote
        if group is not None:
            key = ("evaluation's sums", self._work.number, first)
            self._courier.submit(key, lambda: group.all_reduce(table))
            self._take(key, f"the sums of an evaluation (from micro-batch {first} on)")
        return table.view(-1, width)

    def _take(self, key: Hashable, what: str) -> None:
        """Wait for a sum over all ranks."""
        others = tuple(rank for rank in range(self._plan.workers) if rank != self._rank)
        self._inbox.take(key, lambda: Awaited(what, others))

    def close(self) -> None:
        """Let the threads end."""
        if self._downstream is not None:
            self._downstream.close()
        if self._loader is not None:
            self._loader.close(timeout_s=0.0)


def _summed(rows: Tensor, metrics: Sequence[str]) -> EvaluationSums:
    columns = [math.fsum(column) for column in rows.t().tolist()]
    weighted, weight, *sums = columns
    return EvaluationSums(weighted / weight if weight else 0.0, weight, dict(zip(metrics, sums, strict=True)))
