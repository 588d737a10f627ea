"""F of one rank's micro-batches, in training and in evaluation: what it begins with, and where its results go.

samples (loader) ---------+
                          +--> take_inputs --> sections of the stage --> hand_on to the next stage, or
activation (link, inbox) -+                                              sums of the loss

Steps and micro-batches are the run's: keys in the inbox are (kind, step, number within the global batch).
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from varuna.core.errors import LinkError
from varuna.core.plan import Plan
from varuna.data.loader import Loader
from varuna.data.samples import MicroBatch, SampleSource, verify_digests
from varuna.data.sizes import of_samples, rows_in
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.links.gpu_links import GpuLinks
from varuna.engine.links.groups import Groups
from varuna.engine.links.links import Expected, Receiver, Sender
from varuna.engine.links.message import Layout, There
from varuna.engine.links.trips import Trips
from varuna.engine.pipeline.whole_batch import GlobalCounts
from varuna.engine.stage.losses import LossSums, sums_of
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import Stage
from varuna.partition.batch_layout import check_inputs
from varuna.partition.batch_weight import WeightFunction
from varuna.partition.graph.ranges import check_ranges
from varuna.partition.graph.sample_guards import check_conditions
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.schedule.buffers import SAMPLES_AHEAD
from varuna.schedule.work_order import by_work


class ToldBySamples(NamedTuple):
    """The graph that a micro-batch runs, and how large its tensors are, as its samples tell."""

    variant: int = 0
    """index into the model's graphs"""
    sizes: tuple[int, ...] = ()
    """the sizes that are open"""


_NOTHING = ToldBySamples()


class Variants:
    """Graphs of one rank's micro-batches, where several lengths are declared, and sizes, where they are open.

    Both follow from samples alone, and every stage reads those: a stage that needs no input reads one that tells them.
    So neither sizes of messages nor the order of micro-batches are negotiated. The loader's thread notes them, all
    others read them.
    """

    def __init__(self, model: PartitionedModel, inbox: Inbox) -> None:
        self._model, self._inbox = model, inbox
        self._known: dict[tuple[int, int], ToldBySamples] = {}
        self.several = bool(model.variants)
        """graphs"""
        self._tell = bool(model.telling_keys)

    def note_samples(self, step: int, micro_batch: int, batch: MicroBatch) -> None:
        """Note what is told of a micro-batch whose samples have been read.

        Raises:
            DataError: their length was not declared, or their sizes are not what was captured.
        """
        if self._tell:
            variant = variant_of(self._model, batch.tensors, batch.indices)
            sizes = self._model.sizes
            found = () if sizes is None else sizes.of(batch.tensors, batch.indices)
            self._known[step, micro_batch] = ToldBySamples(variant, found)

    def told_by_samples(self, step: int, micro_batch: int) -> ToldBySamples:
        """Return what is told of a micro-batch, once its samples have been read."""
        return self._known[step, micro_batch] if self._tell else _NOTHING

    def of(self, step: int, micro_batch: int) -> int:
        """Return the index into the model's graphs, once the samples have been read."""
        return self.told_by_samples(step, micro_batch).variant

    def first_unread(self, step: int, micro_batches: Sequence[int]) -> int | None:
        """Return the first of these whose samples have not been read, or could not be; None: all have."""
        return next((micro_batch for micro_batch in micro_batches if (step, micro_batch) not in self._known), None)

    def are_known(self, step: int, micro_batches: Sequence[int]) -> bool:
        """Return whether nothing has to be told of these, or all is told."""
        return not self._tell or self.first_unread(step, micro_batches) is None

    def wait(self, step: int, *micro_batches: int) -> bool:
        """Wait until all samples of these have been read; False if the generation ends first."""
        if not self._tell:
            return True
        try:
            self._inbox.pause(lambda: self.first_unread(step, micro_batches) is None)
        except (GenerationEnded, LinkError):  # the training thread is told, too
            return False
        return True

    def forget(self, before: int) -> None:
        """Forget steps before ``before``."""
        if self._tell:
            for key in [key for key in self._known if key[0] < before]:
                del self._known[key]


_REMEMBERED = 1024


@dataclass(frozen=True)
class Layouts:
    """The layouts of all messages of one stage in one generation.

    Messages have the lengths that follow from the plan and from what samples tell. ``rows`` is how many their tensors
    have, where collate has left samples out.
    """

    plan: Plan
    sections: range
    """of the stage"""
    graphs: tuple[PartitionedModel, ...]
    """one for each declared length"""
    variants: Variants
    """tell the variant that a micro-batch is for"""
    apart: Collection[int]
    """sections into which values travel by themselves, without their header"""
    _made: dict[tuple[int, ToldBySamples, int, int | None, bool], Layout] = field(
        default_factory=dict, repr=False, compare=False
    )
    """by section, what samples told, examples, and whether they are of gradients: a step needs few, each many times"""

    def activation_in(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Return the layout of what the previous stage sends."""
        return self._into(self.sections.start, step, micro_batch, rows)

    def activation_out(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Return the layout of what is sent to the next stage."""
        return self._into(self.sections.stop, step, micro_batch, rows)

    def gradient_in(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Return the layout of what the next stage sends back."""
        return self._into(self.sections.stop, step, micro_batch, rows, gradients=True)

    def gradient_out(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Return the layout of what is sent back to the previous stage."""
        return self._into(self.sections.start, step, micro_batch, rows, gradients=True)

    def _into(self, section: int, step: int, micro_batch: int, rows: int | None, *, gradients: bool = False) -> Layout:
        told, examples = self.variants.told_by_samples(step, micro_batch), len(self.plan.samples_of(micro_batch))
        # A full micro-batch has the layout of rows=None: one key for both.
        rows = None if rows == examples or self.graphs[told.variant].sizes is not None else rows
        key = (section, told, examples, rows, gradients)
        if key not in self._made:
            # Oldest first: with open sizes nearly every micro-batch may have a layout of its own.
            while len(self._made) >= _REMEMBERED:
                self._made.pop(next(iter(self._made)))
            crossings = self.graphs[told.variant].split.crossings[section]
            apart = section in self.apart
            whole = Layout(crossings, examples, digests=True, apart=apart, rows=rows, sizes=told.sizes)
            self._made[key] = _differentiable(whole) if gradients else whole
        return self._made[key]


def _differentiable(layout: Layout) -> Layout:
    return replace(layout, crossings=tuple(c for c in layout.crossings if c.differentiable), digests=False)


class Purpose(NamedTuple):
    """The purpose of a forward pass: keeps training and an evaluation apart between the same ranks."""

    tag: int
    """of activations"""
    key: str
    """first part of keys in the inbox"""
    name: str
    """last part of names that people read"""
    trains: bool


TRAINING = Purpose(1, "", "", trains=True)
EVALUATION = Purpose(3, "evaluation's ", " in an evaluation", trains=False)


class Arrived(NamedTuple):
    """The input with which F of a micro-batch begins."""

    values: dict[str, Tensor]
    """that crossed into the stage, by name"""
    examples: Examples
    batch: MicroBatch | None
    """None: the stage reads no samples"""
    digests: Sequence[int]
    """of the samples; empty if no stage up to this one has read them"""


class ForwardPass:
    """Samples and activations of one rank's micro-batches, and what leaves after F."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        rank: int,
        *,
        model: PartitionedModel,
        buffers: Mapping[str, Tensor],
        groups: Groups,
        inbox: Inbox,
        source: SampleSource,
        weight: WeightFunction | None,
        steps: range,
        purpose: Purpose,
        work_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Open the links, and make a thread that reads samples once they are requested.

        Args:
            stage: this rank's stage.
            plan: whose global batch is run.
            rank: this rank.
            model: what runs, cut as the stage's own model.
            buffers: those that guards of samples, and counts, may ask for.
            groups: the generation's groups.
            inbox: the generation's inbox.
            source: reads samples.
            weight: the user's weight of a micro-batch, if any.
            steps: steps whose activations will arrive.
            purpose: in training, what is read is counted for the whole batch as well, as far ahead as that needs.
            work_of: micro-batches of a step on this rank; those of the plan by default.
        """
        self._stage, self._plan, self._model, self._buffers = stage, plan, model, buffers
        self._inbox, self._weight, self._rank, self._purpose = inbox, weight, rank, purpose
        self._copies = stage.job.traffic.links
        self._batch, self._activation = f"{purpose.key}batch", f"{purpose.key}activation"
        replica = plan.place_of(rank).replica
        mine, pipeline = plan.micro_batches_of(replica), plan.pipeline_of(replica)
        self._work_of = work_of or (lambda step: mine)
        self._most, self._stages, self._first_step = len(mine), pipeline.stages, steps.start
        self._graphs, self.variants = model.graphs, Variants(model, inbox)
        # Sorting by length pays where stages wait for each other; other policies keep the order of the samples.
        self._orders = purpose.trains and self.variants.several and plan.policy == "adaptive" and pipeline.stages > 1
        self.whole = GlobalCounts(model, buffers, plan, rank, inbox, may_miss=source.may_miss)
        # The user's weight may want any input.
        last = pipeline.stages - 1
        keys = [
            None if k == last and weight is not None else model.keys_of(pipeline.sections_of(k))
            for k in range(last + 1)
        ]
        # With one stage that reads samples there is nothing to compare digests with.
        self._keys, self._compared = keys[stage.index], sum(each is None or bool(each) for each in keys) > 1
        reads, ahead = self._keys is None or bool(self._keys), self.whole.ahead if purpose.trains else 0
        # The order is known once all lengths of the step are, so all of it must be read before its first F.
        ahead = max(ahead, self._most if self._orders else 0)
        self._loader = Loader(source, deliver=self._deliver, lookahead=SAMPLES_AHEAD + ahead) if reads else None
        direct = groups.direct if purpose.trains else GpuLinks()
        # A cut is named by the section that begins behind it: into this stage by its first, out of it by its stop.
        ends = (rank - 1, stage.sections.start), (rank + 1, stage.sections.stop)
        apart = frozenset(section for peer, section in ends if peer in direct.sends)
        self.layouts = Layouts(plan, stage.sections, model.graphs, self.variants, apart)
        self.trips_up: Trips | None = Trips() if purpose.trains else None
        """of messages between this stage and the one before it, where they go both ways"""
        self.trips_down: Trips | None = Trips() if purpose.trains else None
        """and between this stage and the next"""
        self.downstream: Sender | None = None
        self.upstream: Receiver | None = None
        if stage.index > 0:
            expected = self.expected(self._activation, self.layouts.activation_in, self.order_of, steps)
            name, channel = self.link_name(rank - 1), direct.receives.get(rank - 1)
            # Stages of a replica have consecutive ranks: neighbours are rank - 1 and rank + 1 (``Plan.rank_of``).
            where = (groups.world, rank - 1, purpose.tag, inbox, name)
            self.upstream = Receiver(*where, expected, self._copies, channel, trips=self.trips_up)
        if not stage.is_last:
            name, channel = self.link_name(rank + 1), direct.sends.get(rank + 1)
            where = (groups.world, rank + 1, purpose.tag, inbox, name)
            self.downstream = Sender(*where, channel, trips=self.trips_down)

    def link_name(self, peer: int) -> str:
        """Name the link with a neighbour, for errors."""
        stage = self._stage.index + peer - self._rank
        return f"of rank {self._rank} with rank {peer} (stage {stage}){self._purpose.name}"

    def _is_ordered(self, step: int) -> bool:
        """Return whether lengths decide on the step's order; not the first's, which begins as soon as one is known."""
        return self._orders and step > self._first_step

    def order_of(self, step: int) -> Sequence[int]:
        """Return the micro-batches of a step on this rank in the order of their forwards; the same on all stages."""
        mine = self._work_of(step)
        if not self._is_ordered(step):
            return mine
        shorter = [-self.variants.of(step, micro_batch) for micro_batch in mine]  # graphs begin with the longest
        return [mine[position] for position in by_work(shorter, self._stages)]

    def await_order(self, step: int) -> None:
        """Wait until ``order_of`` is known.

        Raises:
            GenerationEnded: the manager ended the generation.
            LinkError: a link broke.
            DataError: a sample is not what the model was captured with.
        """
        if not self._is_ordered(step):
            return
        mine, begin_s = self._work_of(step), time.monotonic()

        def is_settled() -> bool:
            unread = self.variants.first_unread(step, mine)  # they are read in this order
            return unread is None or self._inbox.failed((self._batch, step, unread))

        what = f"the samples of step {step}, whose lengths decide on its order"
        self._inbox.wait(is_settled, lambda: Awaited(what))
        self.waited(time.monotonic() - begin_s)
        unread = self.variants.first_unread(step, mine)
        if unread is not None:
            self._here(self._batch, "samples", step, unread, ())

    def expected(
        self, kind: str, layout: Callable[[int, int], Layout], order: Callable[[int], Sequence[int]], steps: range
    ) -> Iterator[Expected | None]:
        """Yield key and sizes of each message of a link, as ``Receiver`` wants them; wait for what samples tell of it.

        What is not known yet may be told only once earlier messages have come: samples of the step after the next are
        not read before the next begins.
        """
        for step in steps:
            needed = self._work_of(step) if self._is_ordered(step) else ()
            # None first: the receiver then takes what is on its way already, and only then waits for samples.
            if not self.variants.are_known(step, needed):
                yield None
                if not self.variants.wait(step, *needed):
                    return
            for micro_batch in order(step):
                if not self.variants.are_known(step, (micro_batch,)):
                    yield None
                    if not self.variants.wait(step, micro_batch):
                        return
                message = layout(step, micro_batch)
                yield (kind, step, micro_batch), message.size_bytes, message.body_bytes

    def copies_of(self, layout: Layout) -> HostCopies:
        """Return the copies that messages of this layout go by."""
        return self._stage.job.traffic.direct if layout.apart else self._copies

    def waited(self, seconds: float) -> None:
        """Report that the training thread has waited for samples."""
        if self._loader is not None:
            self._loader.waited(seconds)

    @property
    def steps_ahead(self) -> int:
        """Number of steps for which samples should be requested, so that all reader processes have work."""
        return 1 if self._loader is None else max(1, -(-self._loader.at_once // max(1, self._most)))

    def request(self, step: int, first: int = 0) -> None:
        """Start to read a step's micro-batches, whose samples begin at position ``first``."""
        if self._loader is not None:
            work = [(j, [first + offset for offset in self._plan.samples_of(j)]) for j in self._work_of(step)]
            self._loader.request(step, work, self._keys, compared=self._compared)

    def _deliver(self, step: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
        found: MicroBatch | BaseException = batch
        if isinstance(batch, MicroBatch):
            try:
                self.variants.note_samples(step, micro_batch, batch)
                if self._purpose.trains:
                    self.whole.count_micro_batch(step, micro_batch, batch)
            except Exception as error:  # noqa: BLE001 - for the thread that needs it; a silent loader would hang it
                found = error
        if self._purpose.trains and isinstance(found, BaseException):
            self.whole.count_micro_batch(step, micro_batch, found)
        self._inbox.put((self._batch, step, micro_batch), found)

    def has_samples(self, step: int, micro_batch: int) -> bool:
        """Return whether the samples are there, or none are needed."""
        return self._loader is None or self._inbox.has((self._batch, step, micro_batch))

    def has_input(self, step: int, micro_batch: int) -> bool:
        """Return whether F can run, or must, to raise what was wrong with the samples."""
        if self._loader is not None:
            samples = (self._batch, step, micro_batch)
            if not self._inbox.has(samples):
                return False
            if self._inbox.failed(samples):
                return True  # the activation may never come, since its length follows from samples
        return self._stage.index == 0 or self._inbox.has((self._activation, step, micro_batch))

    def take_inputs(self, step: int, micro_batch: int) -> Arrived:
        """Wait for what F of a micro-batch begins with.

        Raises:
            GenerationEnded: the manager ended the generation.
            LinkError: a link broke, or nothing came within the bound.
            DataError: a sample is not what the model was captured with, or differs between stages.
        """
        stage, batch = self._stage, None
        if self._loader is not None:
            batch = self._here(self._batch, "samples", step, micro_batch, ())
            # The loader counts those that are not taken: from here on it may deliver one more.
            self._loader.taken()
        read = len(self._plan.samples_of(micro_batch))
        values, digests, there = dict[str, Tensor](), list[int](), There(read, read)
        if batch is not None:
            there = There(rows_in(batch.tensors), self._model.samples_in(batch.tensors))
        if stage.index > 0:
            buffer = self._here(self._activation, "activation", step, micro_batch, (self._rank - 1,))
            # Twice: the header has its place whatever the rows, and says how many rows the tensors behind it have.
            there = self.layouts.activation_in(step, micro_batch).there(buffer)
            layout = self.layouts.activation_in(step, micro_batch, there.rows)
            values, digests = layout.unpack(buffer, self.copies_of(layout)), layout.digests_of(buffer)
            if batch is not None and any(digests):
                # Digests may come from any stage before this one; the rank of stage 0 stands for them.
                first = self._rank - stage.index
                verify_digests(batch, digests, who=f"an earlier stage (below stage {stage.index})", rank=first)
        if batch is not None:
            digests = list(batch.digests)
        return Arrived(values, self._examples(step, micro_batch, batch, there), batch, digests)

    def _here(self, key: str, what: str, step: int, micro_batch: int, on: tuple[int, ...]) -> Any:
        def describe() -> Awaited:
            return Awaited(f"the {what} of micro-batch {micro_batch}{self._purpose.name or f' (step {step})'}", on)

        return self._inbox.take((key, step, micro_batch), describe)

    def _examples(self, step: int, micro_batch: int, batch: MicroBatch | None, there: There) -> Examples:
        told = self.variants.told_by_samples(step, micro_batch)
        graph = self._graphs[told.variant]
        # One stage of a replica checks for all: the others get the same samples.
        if batch is not None and self._stage.index == 0:
            check_conditions(graph.conditions, batch.tensors, batch.indices, self._buffers)
        given = dict(self.whole.numbers(told.variant, there.samples))
        if batch is not None:
            check_inputs(graph.inputs, batch.tensors, batch.indices)
            check_ranges(graph.ranges, batch.tensors, batch.indices)
            given.update(of_samples(batch.tensors))
        return Examples(
            self._copies.copy_to_device(given) if given else {}, there.rows, told.variant, told.sizes, there.samples
        )

    def hand_on(self, step: int, micro_batch: int, values: Mapping[str, Tensor], arrived: Arrived) -> None:
        """Send what crosses into the next stage."""
        assert self.downstream is not None
        there = There(arrived.examples.size, arrived.examples.samples)
        layout = self.layouts.activation_out(step, micro_batch, there.rows)
        self.downstream.send(layout.pack(values, arrived.digests, self.copies_of(layout), there))

    def sums(self, micro_batch: int, results: Sequence[Tensor], arrived: Arrived) -> LossSums:
        """Return what a micro-batch contributes to the loss, from the results of the last stage."""
        examples, batch = arrived.examples, arrived.batch
        read, model = len(self._plan.samples_of(micro_batch)), self._graphs[examples.variant]
        return sums_of(model, self._weight, micro_batch, results, examples, batch, read, self._plan.global_batch)

    def close(self) -> None:
        """Drop queued work; threads end when their queues are empty or their groups abandoned."""
        if self.downstream is not None:
            self.downstream.close()
        if self._loader is not None:
            self._loader.close(timeout_s=0.0)
