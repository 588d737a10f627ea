"""Checks the assumptions of a capture before a run begins."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from varuna.checks.draws import SameDraws
from varuna.checks.probes import computing
from varuna.core.errors import DataError, ModelError
from varuna.data.randomness import generator_lock
from varuna.data.samples import LOOKED_AT, SampleSource
from varuna.data.sizes import rows_in
from varuna.engine.stage.guards import BranchResults, another_way
from varuna.engine.stage.section import Examples, SectionRunner, Tensors
from varuna.partition.batch_weight import completed
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.capture.loops import MaskLoopUnroller
from varuna.partition.graph.ranges import check_ranges
from varuna.partition.graph.sample_guards import check_conditions
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.originals.modes import into_training
from varuna.process.console import say, warn

_TOKENS = 3
"""Samples are cut to this many tokens, so that some experts get none."""
_TOLERANCE = 1e-4

_Outcome = tuple[Tensor, dict[str, Tensor]]


def check_assumptions(
    model: PartitionedModel, recipe: Recipe, initial: Initial, source: SampleSource, micro_batch: int = 1
) -> None:
    """Check the first samples against branches that capture took, and its loops against those of the model.

    Args:
        model: as captured.
        recipe: from which it was captured.
        initial: the whole model with initial values.
        source: reads samples.
        micro_batch: examples, if the user fixed it: a branch may go the same way for each so many, but not for one.

    Raises:
        DataError: a branch of forward() goes two ways for the first samples already, or not as it was captured; or a
            sample has a whole number that an embedding or a loss cannot take.
        ModelError: a loop over the places where a mask is true does something for other places as well.
    """
    count = LOOKED_AT if source.size is None else min(LOOKED_AT, source.size)
    groups = [range(first, first + micro_batch) for first in range(0, max(count - micro_batch, 0) + 1, micro_batch)]
    if any(graph.conditions or graph.ranges for graph in model.graphs):
        for positions in groups:
            batch = source.micro_batch(positions)
            graph = model.graphs[variant_of(model, batch.tensors, batch.indices)]
            check_ranges(graph.ranges, batch.tensors, batch.indices)
            check_conditions(graph.conditions, batch.tensors, batch.indices, initial.buffers)
    if model.visits_all:
        _check_loops(recipe, initial, source, count)
    places = dict.fromkeys(place for graph in model.graphs for section in graph.sections for place in section.truths)
    if places:
        with computing(initial, recipe.dtype) as cast:
            _check_truths(model, cast, source, groups, places)


def _check_truths(
    model: PartitionedModel, initial: Initial, source: SampleSource, groups: Iterable[range], places: Iterable[str]
) -> None:
    """Run the sections one after another, and see whether branches on activations go as they were captured."""
    say(
        f"forward() branches on computed values ({', '.join(places)}): captured with the branches of the first "
        "samples; a step that takes another branch is refused"
    )
    for positions in groups:
        batch = source.micro_batch(positions)
        graph = model.graphs[variant_of(model, batch.tensors, batch.indices)]
        odd = _first_false(graph, initial, batch.tensors)
        if odd is not None:
            raise DataError(f"{another_way(odd, batch.indices)} The run does not start.")


def _first_false(graph: PartitionedModel, initial: Initial, batch: Mapping[str, Tensor]) -> str | None:
    truths, values = BranchResults(), dict[str, Tensor]()
    examples = Examples(completed(graph, batch, initial.buffers), rows_in(batch))
    crossings = {each.name: each for into in graph.split.crossings for each in into}
    for section in graph.sections:
        fixed = [initial.buffers[name] for name in section.buffers] + [graph.constants[n] for n in section.constants]
        tensors = Tensors(tuple(initial.parameters[name] for name in section.parameters), tuple(fixed))
        runner = SectionRunner(section, tensors, crossings, 0, guard=truths.keep_results)
        made = runner.forward(values, examples, 0, 0)
        values.update(zip(section.makes, made, strict=True))
    odd = truths.take_false()
    return None if odd is None else odd[1]


def _check_loops(recipe: Recipe, initial: Initial, source: SampleSource, count: int) -> None:
    """Run the plain model with its loops as written, and with loops that visit every place, until that differs."""
    losses = LossModule(into_training(initial.module), recipe)
    for position in range(count):
        whole = source.micro_batch([position]).tensors
        for batch in ({key: _cut(value) for key, value in whole.items()}, whole):
            places = MaskLoopUnroller()
            try:
                written, visiting = _outcome(losses, batch, None), _outcome(losses, batch, places)
            except Exception:  # noqa: BLE001 - not every model takes a few tokens
                continue
            if not _equal(written, visiting):
                raise ModelError(
                    "forward() loops over the places where a mask is true (for i in mask.nonzero()), and does "
                    "something at the other places too when it visits them, so it cannot be captured. Two ways "
                    "out: make the loop do nothing there (like an expert without tokens), or wrap the loop into "
                    "one operator with torch.library.custom_op. See docs/partitioning.md, section Refusals."
                )
            if places.added:
                return
    warn(
        "forward() loops over the places where a mask is true; Varuna visits all of them. "
        "Whether this gives the same result could not be checked, because the first samples leave no place out."
    )


def _cut(value: Tensor) -> Tensor:
    return value[:, :_TOKENS] if value.dim() > 1 else value


def _outcome(losses: LossModule, batch: Mapping[str, Tensor], places: MaskLoopUnroller | None) -> _Outcome:
    losses.zero_grad()
    with generator_lock, torch.random.fork_rng(devices=[]), SameDraws():  # type: ignore[no-untyped-call]
        with places or nullcontext():
            loss = losses({key: value.clone() for key, value in batch.items()})[0]
        loss.backward()
    gradients = {name: value.grad for name, value in losses.named_parameters() if value.grad is not None}
    losses.zero_grad()
    return loss.detach(), gradients


def _equal(one: _Outcome, two: _Outcome) -> bool:
    """Whether two outcomes are equal; a missing gradient (an expert that is not visited) equals zeros."""
    names = {*one[1], *two[1]}
    pairs = [(one[1].get(name), two[1].get(name)) for name in names]
    return _close(one[0], two[0]) and all(_close(a, b) for a, b in pairs)


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        odd = b if a is None else a
        return odd is None or not odd.any()
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * max(scale, 1e-12), equal_nan=True))
