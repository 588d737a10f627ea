"""A partitioned model: sections with their graphs, tied parameters, and the facts that planning needs.

``partition`` makes it in this order; each line rewrites or reads the one graph of the line above::

    capture                           recipe, batch           -> one flat graph
    plain masks, simplify, strides    the same values, with less
    reached                           from the loss back      -> trainable parameters
    terms, _weigh                     the loss                -> counter of targets, or terms (Whole), or neither
    _take_updates                     writes to buffers       -> BufferWrite, applied at the commit
    Flow, costs, choose               ops, live bytes         -> positions to cut after
    split                             positions               -> sections, crossings
    _facts                            sections                -> bytes, nominal seconds, digests: all that plans need
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from varuna.core.errors import ModelError
from varuna.core.model import ModelFacts, SectionFacts, TiedParameter
from varuna.data.sizes import PREFIX, OpenSizes, rows_in, samples_in
from varuna.partition.after_step import AfterStep, Following, trace
from varuna.partition.batch_layout import InputLayout, layouts_of
from varuna.partition.capture.capture import Batch, Capture, Recipe, capture
from varuna.partition.cut.buffers import BufferWrite, batch_statistics, find_writes, separate_updates
from varuna.partition.cut.cuts import choose_cuts
from varuna.partition.cut.footprint import footprints
from varuna.partition.cut.same_graph import code_of
from varuna.partition.cut.split import Crossing, SectionGraph, Split, section_graph, split
from varuna.partition.cut.strides import settle_strides
from varuna.partition.graph.costs import CPU_SLOWDOWN, Cost, Sizes, cost_of
from varuna.partition.graph.flow import Flow
from varuna.partition.graph.operations import Operation, operation
from varuna.partition.graph.plain_masks import without_plain_masks
from varuna.partition.graph.ranges import Range
from varuna.partition.graph.reached import reached_parameters
from varuna.partition.graph.sample_guards import Conditions
from varuna.partition.graph.simplify import simplify
from varuna.partition.held_names import held_besides, kept_together
from varuna.partition.loss.buffer_updates import updates_of_whole_batch
from varuna.partition.loss.split_terms import Splitting
from varuna.partition.loss.target_count import CannotCountError, add_count
from varuna.partition.loss.terms import Mixing, Terms, mixing_at, mixing_of, place_of, terms_of
from varuna.partition.loss.unknown_operations import Trial, trial_of
from varuna.partition.loss.whole_batch import Whole
from varuna.partition.optimizer_needs import OptimizerNeeds, try_update
from varuna.partition.optimizers import OptimizerFactory
from varuna.partition.streamable import streamable
from varuna.partition.watching.sources import function_digest

CutChooser = Callable[[Flow, Sequence[Cost]], list[int]]
"""Positions to cut after, ascending, where ``Flow.live_bytes`` allows it."""


_NORMALISES = "uses the mean and variance of the micro-batch"


@dataclass(frozen=True)
class PartitionedModel:
    """Everything about a model that does not depend on P, D or m."""

    split: Split
    facts: ModelFacts
    shapes: Mapping[str, tuple[int, ...]]
    """parameter (first name) -> shape"""
    dtypes: Mapping[str, torch.dtype]
    """parameter -> dtype that a run in fp32 keeps it in, where that is bf16 or fp16"""
    trainable: frozenset[str]
    streamable: frozenset[str]
    """parameters that may be on the device only while their section runs"""
    aliases: Mapping[str, str]
    """further name of a tied parameter or buffer -> its first name"""
    constants: Mapping[str, Tensor]
    metrics: tuple[str, ...]
    counter: SectionGraph | None
    """counts the targets of a batch from its inputs; None: examples are counted"""
    whole: Whole | None
    """numbers of the whole batch that sections must know, where the terms of the loss count different things"""
    normalisations: tuple[Mixing, ...]
    """operations over the statistics of a micro-batch"""
    mixing: tuple[Mixing, ...]
    """operations by which the examples of a batch get into each other's losses, or may"""
    trial: Trial | None
    """decides about those that only may"""
    inputs: Mapping[str, InputLayout]
    """layout that each key of the batch was captured with, of those that the graph reads"""
    operations: tuple[Operation, ...]
    """of the graph, in order"""
    cuts: tuple[int, ...]
    """after which of them it is cut"""
    visits_all: bool = False
    """loops over the places where a mask is true run for every place (``partition.capture.loops``)"""
    conditions: Conditions | None = None
    """conditions on samples under which the branches of forward() went this way"""
    ranges: tuple[Range, ...] = ()
    """ranges of the whole numbers in samples that its embeddings and losses can take"""
    eager: Mapping[str, str] = field(default_factory=dict)
    """path of a module that runs eagerly, as one operation (``partition.opaque``) -> why"""
    variants: tuple["PartitionedModel", ...] = ()
    """the model at each declared length (``partition.lengths``), the longest first; empty if there is one only"""
    length_keys: tuple[str, ...] = ()
    """keys of the batch that tell its length, if several were declared"""
    following: Following | None = None
    """the values that the user's ``after_step`` makes, and of which"""
    sizes: OpenSizes | None = None
    """sizes of a batch that its samples tell; None: it has one row for each sample"""

    @property
    def graphs(self) -> tuple["PartitionedModel", ...]:
        """The graphs that may run, one for each length; all have the same sections, with the same state."""
        return self.variants or (self,)

    @property
    def counts_targets(self) -> bool:
        """Whether the last section returns the number of targets after the loss."""
        return self.counter is not None

    @property
    def sections(self) -> tuple[SectionGraph, ...]:
        """All sections in order."""
        return self.split.sections

    @property
    def changing(self) -> frozenset[str]:
        """Parameters and buffers that steps change, and those that ``after_step`` computes with."""
        return _changing(self.trainable, self.sections, self.following)

    @property
    def gradient_free(self) -> int:
        """Number of first sections that need no backward: nothing is trained in them, nor below them."""
        return _gradient_free(self.split, self.trainable)

    def keys_of(self, sections: Iterable[int]) -> tuple[str, ...]:
        """Keys of the batch that a stage with these sections reads, at any length.

        The first also checks the conditions; one that needs no input reads what tells the length.
        """
        mine = list(sections)
        wanted = [key for graph in self.graphs for section in mine for key in graph.sections[section].inputs]
        wanted = [key for key in wanted if not key.startswith(PREFIX)]
        if len(self.sections) - 1 in mine:  # that stage counts
            counters = [graph.whole.counter for graph in self.graphs if graph.whole is not None]
            wanted += [key for counter in counters if counter is not None for key in counter.inputs]
        if 0 in mine:
            wanted += [key for graph in self.graphs if graph.conditions for key in graph.conditions.inputs]
        return tuple(dict.fromkeys((*wanted, *self.telling_keys)))

    @property
    def telling_keys(self) -> tuple[str, ...]:
        """Keys of the batch that tell the sizes of what crosses: every stage reads them."""
        return (*self.length_keys[:1], *(() if self.sizes is None else self.sizes.keys))

    def samples_in(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of samples that a batch counts for, where examples are counted."""
        found = samples_in(batch)
        return rows_in(batch) if found and self.sizes is None else found

    def owner_of(self, parameter: str) -> int:
        """The lowest section that uses ``parameter``."""
        return next(section.index for section in self.sections if parameter in section.parameters)


def partition(
    recipe: Recipe,
    batch: Batch,
    *,
    optimizer: OptimizerFactory | None = None,
    cut_points: int | None = None,
    count_targets: bool = True,
    on_cpu: bool = True,
    choose: CutChooser | None = None,
    after_step: AfterStep | None = None,
) -> PartitionedModel:
    """Capture a model and cut it into sections.

    Args:
        recipe: the model and its loss.
        batch: a collated batch; only shapes and dtypes matter.
        optimizer: factory, run once on fake parameters to learn the bytes of its state.
        cut_points: requested number of cut-points; default: every place with few live bytes.
        count_targets: weigh a micro-batch by its targets where the captured loss averages over them.
        on_cpu: the workers have no GPU: nominal times are those of a CPU.
        choose: places the cuts; default: by cost and live bytes.
        after_step: runs after each step on parameters and buffers, and is tried on some without data.

    Raises:
        ModelError: the model cannot be captured, or has too few places to cut.
    """
    captured = capture(recipe, batch)
    without_plain_masks(captured)
    simplify(captured)
    settle_strides(captured)
    loss = next(node for node in captured.graph.nodes if node.op == "output").args[0][0]
    captured = replace(captured, trainable=reached_parameters(captured, loss))
    terms = terms_of(captured)
    counter, splitting, mixing = _weigh(captured, terms, count_targets=count_targets)
    output = next(node for node in captured.graph.nodes if node.op == "output")
    # read by place in the engine: loss, count of targets, metric sums
    results = [output.args[0][0], *([counter] if counter else []), *output.args[0][1:]]
    if counter is not None:
        with captured.graph.inserting_before(output):
            output.args = (tuple(results),)
    following = None
    if after_step is not None:
        following = trace(after_step, *captured.kinds)
        captured = replace(captured, sources=f"{captured.sources} {function_digest(after_step)}")
    updates, together = kept_together(captured, _take_updates(captured, results, mixing), following)
    opened = captured.sizes
    each, samples = ((), None) if opened is None else (opened.per_sample, opened.samples)
    sizes = Sizes(captured.batch_symbol, dict(zip(captured.open_symbols, each, strict=True)), samples)
    flow = Flow(captured, sizes, together)
    costs = [cost_of(node, sizes) for node in flow.ops]
    if choose is None:
        cuts = choose_cuts([cost.forward_s for cost in costs], flow.live_bytes(), cut_points, layers=flow.layers())
    else:
        cuts = choose(flow, costs)
    if cut_points is not None and len(cuts) < cut_points:
        raise ModelError(
            f"cut={cut_points} requested, but only {len(cuts)} cut points exist. Pass cut={len(cuts)}, or leave it out."
        )
    divided = split(flow, cuts, results, updates)
    if following is not None:
        # the first split says which names each section uses; only then is known what it must hold besides
        used = {name for section in divided.sections for name in section.parameters}
        divided = split(flow, cuts, results, updates, held_besides(divided, following))
        held = {name for section in divided.sections for name in section.parameters} - used
        # what forward() does not use has no gradient in plain PyTorch, so no optimizer touches it
        captured = replace(captured, trainable=captured.trainable - held)
    # numbered behind the last section: no stage runs these, and they own no op
    count = None if counter is None else section_graph(flow, len(divided.sections), [], [counter])
    whole = None if splitting is None else splitting.whole(flow, len(divided.sections))
    trial = trial_of(flow, terms, len(divided.sections))
    _check_counted(count, None if whole is None else whole.counter)
    counters = (count, None if trial is None else trial.graph, None if whole is None else whole.counter)
    readers = (*divided.sections, *(reader for reader in counters if reader is not None))
    read = (key for reader in readers for key in reader.inputs if not key.startswith(PREFIX))
    inputs = layouts_of(batch, (*read, *captured.condition_inputs), opened)
    # a complex parameter is two numbers, [..., 2], to the optimizer, and so in counts of bytes (_facts)
    trainable = {name: captured.shapes[name] + (2,) * (name in captured.pairs) for name in captured.trainable}
    parameters = [section.parameters for section in divided.sections]
    update = try_update(optimizer, trainable, parameters, on_cpu=on_cpu) if optimizer else None
    resting = streamable(divided.sections, _changing(captured.trainable, divided.sections, following))
    slowdown = CPU_SLOWDOWN if on_cpu else 1.0
    facts = _facts(captured, divided, flow, cuts, update, slowdown, recipe.dtype, inputs, resting)
    return PartitionedModel(
        split=divided,
        facts=facts,
        shapes=captured.shapes,
        dtypes=captured.dtypes,
        trainable=captured.trainable,
        streamable=resting,
        aliases=captured.aliases,
        constants=captured.constants,
        metrics=captured.metrics,
        counter=count,
        whole=whole,
        normalisations=tuple(mixing_at(node, _NORMALISES) for node in batch_statistics(captured.graph)),
        mixing=mixing,
        trial=trial,
        inputs=inputs,
        visits_all=captured.visits_all,
        conditions=captured.conditions,
        ranges=captured.ranges,
        eager=captured.eager,
        operations=tuple(map(operation, flow.ops)),
        cuts=tuple(cuts),
        following=following,
        sizes=opened,
    )


def _take_updates(captured: Capture, results: Sequence[Node], mixing: Sequence[Mixing]) -> tuple[BufferWrite, ...]:
    """Take writes to buffers out of the graph: for one update a step, where that is what plain PyTorch does.

    Where micro-batches belong together, as with batch normalisation, plain PyTorch counts in each of them.
    """
    writes = find_writes(captured, results)
    by_micro_batch = bool(writes.normalised) or any(each.certain for each in mixing)
    at_once = [*writes.read, *(() if by_micro_batch else writes.counted)]
    # by place in the graph: sets have no order, and workers must number updates alike
    order = {node: place for place, node in enumerate(captured.graph.nodes)}
    whole = updates_of_whole_batch(captured, sorted(at_once, key=order.__getitem__), results, required=writes.read)
    return (*whole, *separate_updates(captured, [*results, *(truth.node for truth in captured.truths)]))


def _weigh(
    captured: Capture, terms: Terms, *, count_targets: bool
) -> tuple[Node | None, Splitting | None, tuple[Mixing, ...]]:
    """Return the node that counts what the loss is a mean of, or the rewritten terms; and what mixes examples."""
    mixing = mixing_of(terms)
    if not count_targets:
        return None, None, mixing
    if terms.single is not None:
        return add_count(captured, terms.single), None, mixing
    splitting = Splitting(captured, terms)
    try:
        splitting.rewrite()
    except CannotCountError as error:
        if any(each.certain for each in mixing):  # the reason, which check_mixing tells
            return None, None, mixing
        raise ModelError(
            f"the loss divides by a number of the whole batch{_at(error.node)} that cannot be counted for each part of "
            "the batch and added up. Sums, counts and sizes of inputs can. Pass loss=varuna.Loss(..., "
            "weight=fn), where fn(batch) returns what the loss averages over, or change the divisor."
        ) from error
    return None, splitting, mixing


def _check_counted(*counters: SectionGraph | None) -> None:
    """Check that counts follow from inputs alone."""
    if any(counter.takes or counter.parameters for counter in counters if counter is not None):
        raise ModelError(
            "the divisor of the loss cannot be counted from the inputs alone. Pass loss=varuna.Loss(..., "
            "weight=fn), where fn(batch) returns what the loss averages over."
        )


def _at(node: Node) -> str:
    where = place_of(node)
    return f", at {where}," if where else ""


def _changing(
    trainable: frozenset[str], sections: Iterable[SectionGraph], following: Following | None
) -> frozenset[str]:
    updated = frozenset(name for section in sections for name in section.updated)
    return trainable | updated | (frozenset() if following is None else following.involved)


def _facts(
    captured: Capture,
    divided: Split,
    flow: Flow,
    cuts: Sequence[int],
    update: OptimizerNeeds | None,
    slowdown: float,
    dtype: torch.dtype,
    inputs: Mapping[str, InputLayout],
    resting: frozenset[str],
) -> ModelFacts:
    state_bytes = dict(update.state_bytes) if update else {}
    counts = {
        name: torch.Size(shape).numel() * (1 + (name in captured.pairs)) for name, shape in captured.shapes.items()
    }
    own = {**(captured.dtypes if dtype is torch.float32 else {}), **captured.packed}
    sizes = {name: own.get(name, dtype).itemsize * count for name, count in counts.items()}
    if dtype is not torch.float32:  # the fp32 parameters that the optimizer updates
        for name in captured.trainable:
            state_bytes[name] = state_bytes.get(name, 0) + 4 * counts[name]
    # section k has the ops behind bounds[k - 1], up to bounds[k]
    bounds = [*cuts, len(flow.ops) - 1]
    found = footprints(divided.sections, flow)
    gradient_free = _gradient_free(divided, captured.trainable)
    facts, start, read = [], 0, set[str]()
    for section, end, footprint in zip(divided.sections, bounds, found, strict=True):
        costs = [cost_of(node, flow.sizes) for node in flow.ops[start : end + 1]]
        leaving = divided.crossings[section.index + 1] if section.index + 1 < len(divided.sections) else ()
        names = set(section.parameters)
        is_free = section.index < gradient_free
        activation_bytes = footprint.activation_bytes if footprint else sum(cost.output_bytes for cost in costs)
        back = [crossing for crossing in leaving if crossing.differentiable]
        # Gradients of what earlier sections have made for later ones wait while this one's backward runs.
        passing_bytes = sum(_example_bytes(each) for each in back if each.name not in section.makes)
        facts.append(
            SectionFacts(
                label=section.label,
                forward_s=sum(cost.forward_s for cost in costs) * slowdown,
                parameter_bytes=sum(sizes[name] for name in names),
                trainable_bytes=sum(sizes[name] for name in names & captured.trainable),
                frozen_bytes=sum(sizes[name] for name in names & resting),
                gradient_bytes=sum(  # the sum in fp32, and what the optimizer of half a float is shown
                    4 * counts[name] + sizes[name] * (name in own) for name in names & captured.trainable
                ),
                optimizer_bytes=sum(state_bytes.get(name, 0) for name in names),
                update_bytes=update.step_bytes[section.index] if update else 0,
                activation_bytes=0 if is_free else activation_bytes,
                forward_bytes=footprint.forward_bytes if footprint else 0,
                backward_bytes=footprint.backward_bytes + passing_bytes if footprint and not is_free else 0,
                fixed_bytes=footprint.fixed_bytes if footprint and not is_free else 0,
                split_bytes=footprint.split_bytes + passing_bytes if footprint and not is_free else None,
                split_fixed_bytes=footprint.split_fixed_bytes if footprint and not is_free else 0,
                queued_bytes=footprint.queued_bytes if footprint and not is_free else None,
                input_bytes=sum(inputs[k].size_bytes for k in section.inputs if k in inputs and k not in read),
                statistics_bytes=sum(map(_example_bytes, section.statistics)),
                boundary_bytes=sum(map(_example_bytes, leaving)),
                gradient_boundary_bytes=None if len(back) == len(leaving) else sum(map(_example_bytes, back)),
                gradient_free=is_free,
            )
        )
        start = end + 1
        read.update(section.inputs)
    digest = graph_digest(divided, captured.shapes)
    return ModelFacts(
        digest=digest,
        code_digest=hashlib.sha256(f"{digest} {captured.sources}".encode()).hexdigest(),
        state_digest=_state_digest(captured, divided),
        sections=tuple(facts),
        tied=_tied(divided, sizes),
        updates_together=update is not None and update.together,
        combines=update is None or update.combines,
        batch_dependent=any(update.kinds is None for section in divided.sections for update in section.updates)
        or bool(batch_statistics(captured.graph)),
    )


def _example_bytes(crossing: Crossing) -> int:
    return torch.Size(crossing.shape(1)).numel() * crossing.dtype.itemsize


def _gradient_free(divided: Split, trainable: frozenset[str]) -> int:
    for section in divided.sections:
        # what crosses with a gradient comes from something that is trained before this section
        taken = {crossing.name for crossing in divided.crossings[section.index] if crossing.differentiable}
        if not trainable.isdisjoint(section.parameters) or not taken.isdisjoint(section.takes):
            return section.index
    return len(divided.sections)


def _tied(divided: Split, sizes: Mapping[str, int]) -> tuple[TiedParameter, ...]:
    users: dict[str, list[int]] = {}
    for section in divided.sections:
        for name in dict.fromkeys(section.parameters):
            users.setdefault(name, []).append(section.index)
    return tuple(
        TiedParameter(name=name, sections=tuple(sections), size_bytes=sizes[name])
        for name, sections in users.items()
        if len(sections) > 1
    )


def graph_digest(divided: Split, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Hash of graphs, cuts, names and shapes, which must be equal on all workers and across restarts."""
    digest = hashlib.sha256()
    for section in divided.sections:
        digest.update(code_of(section.module).encode())
        digest.update(repr((section.takes, section.inputs, section.parameters, section.buffers, section.kept)).encode())
        for update in section.updates:
            digest.update(repr((update.buffers, update.statistics, update.kinds, code_of(update.module))).encode())
    digest.update(repr(divided.crossings).encode())
    digest.update(repr(sorted(shapes.items())).encode())
    return digest.hexdigest()


def _state_digest(captured: Capture, divided: Split) -> str:
    """Hash of names and shapes by section, which a checkpoint must fit; the computation may change."""
    parameters = [[(name, tuple(captured.shapes[name])) for name in section.parameters] for section in divided.sections]
    updated = [section.updated for section in divided.sections]
    return hashlib.sha256(repr((parameters, updated)).encode()).hexdigest()
