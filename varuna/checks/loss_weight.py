"""The check at the start of a run: is the loss of a batch the weighted mean of the losses of its parts?

The weight follows from the graph (``partition.loss.terms``), or is the user's. This is the second look: some samples at
once, one by one and in halves, as the model is and with parameters magnified, since a fresh model finds all samples
about equally hard, and hides the error.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from varuna.checks.autocast import without_autocast
from varuna.checks.cause import Evidence, refused
from varuna.checks.draws import NoDraws
from varuna.checks.outcome import controlled
from varuna.checks.probes import computing
from varuna.checks.samples import computes_over_batch
from varuna.core.errors import ModelError
from varuna.data.samples import LOOKED_AT, MicroBatch, SampleSource
from varuna.data.sizes import rows_in
from varuna.engine.stage.section import Examples, SectionRunner, Tensors
from varuna.partition.batch_layout import check_inputs
from varuna.partition.batch_weight import WeightFunction, numbers_of, weight_of
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.watching.side_effects import watched
from varuna.process.console import warn

_COMPARED = 16
_COMPARED_OF_LARGE = 4
_LARGE = 20_000_000
"""Elements of parameters: from here on, fewer samples are compared."""
_TOLERANCE = 2e-5
"""Relative; fp32 sums differ by about 1e-7, an unshifted count of labels by 1e-4."""
_CERTAIN = 10
"""An error this many times larger than rounding's has another cause."""
_LEAST = 3e-7
"""Relative error of any fp32 sum."""
_NUDGE = 2.0**-20
"""Parameters are changed by this part, to see what rounding may do."""


def check_weighing(
    model: PartitionedModel,
    recipe: Recipe,
    initial: Initial,
    source: SampleSource,
    weight: WeightFunction | None,
    fewest: int = 1,
) -> None:
    """Compare one batch of samples, unequal if there are such, with its weighted parts.

    Args:
        model: as captured.
        recipe: the same.
        initial: the whole model; it is put back as it was.
        source: reads samples.
        weight: the user's weight of a micro-batch, if any.
        fewest: samples that the plain model needs.

    Raises:
        ModelError: they differ, so the loss would depend on P, D and m.
        DataError: a sample is not shaped like those that were captured.
    """
    try:
        with computing(initial, torch.float32, widened=True) as own:
            check = _Check(model, recipe, own, source, weight, fewest)
            positions = check.positions(_COMPARED if _elements(initial) < _LARGE else _COMPARED_OF_LARGE)
            if len(positions) < 2 * fewest:
                return
            if model.facts.batch_dependent:
                initial.module.eval()
            found = check.run(positions)
    except RuntimeError as error:
        if not model.dtypes:
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
        warn(f"how the loss weighs samples could not be checked: with all parameters in fp32 the model fails ({why})")
        return
    if found is not None:
        raise ModelError(found)


def _elements(initial: Initial) -> int:
    return sum(value.numel() for value in initial.parameters.values())


class _Check:
    def __init__(
        self,
        model: PartitionedModel,
        recipe: Recipe,
        initial: Initial,
        source: SampleSource,
        weight: WeightFunction | None,
        fewest: int,
    ) -> None:
        self._model, self._initial, self._source, self._weight = model, initial, source, weight
        self._fewest = fewest
        self._in_fp32 = recipe.dtype is torch.float32 and not model.dtypes
        self._batches: dict[tuple[int, ...], MicroBatch] = {}
        self._each = 1 if model.sizes is None or model.sizes.samples is None else model.sizes.samples
        self._losses = LossModule(initial.module, replace(recipe, dtype=torch.float32))

    def positions(self, count: int) -> list[int]:
        """Samples of one length: first those that weigh differently, then others whose whole numbers differ.

        Where batches are lists of samples: numbers of lists.
        """
        looked_at = LOOKED_AT if self._source.size is None else min(LOOKED_AT, self._source.size)
        looked_at = looked_at if self._each == 1 else max(2, looked_at // self._each)  # one would have no parts
        variant: int | None = None
        seen: dict[object, int] = {}
        others: list[int] = []
        for position in range(looked_at):
            batch = self._read([position])
            mine = variant_of(self._model, batch.tensors, batch.indices)
            check_inputs(self._model.graphs[mine].inputs, batch.tensors, batch.indices)
            if variant is not None and mine != variant:
                continue
            variant = mine
            counted = self._counted(batch)
            if counted > 0 or self._model.whole is not None:
                seen.setdefault((counted, _counts(batch)), position)
            others.append(position)
        return [*dict.fromkeys([*seen.values(), *others])][:count]

    def _counted(self, batch: MicroBatch) -> float:
        return weight_of(self._model, self._weight, batch.tensors, self._initial.buffers)

    def run(self, positions: Sequence[int]) -> str | None:
        """A message about what is wrong; empty if nothing is."""
        plain = self._whole(positions)
        if plain is None:
            return None
        error, rounding = self._error(positions, plain)
        magnified = rounded = 0.0
        with self._scaled(4.0):
            large = self._whole(positions)
            if large is not None:
                magnified, rounded = self._error(positions, large)
        certain = error > max(_TOLERANCE, _CERTAIN * rounding)
        shown = magnified > max(_TOLERANCE, _CERTAIN * rounded) and error > _CERTAIN * max(rounding, _LEAST)
        if not (certain or shown):
            return None
        return self._drawn(positions) or self._of_alone(self._otherwise(positions)) or self._message(positions, plain)

    def _drawn(self, positions: Sequence[int]) -> str | None:
        """The message about draws that are not torch's, if there are any: micro-batches would draw otherwise."""
        with watched() as seen:
            self._loss(positions)
        cause = refused(Evidence(draws=tuple(seen.draws))) if seen.draws else None
        return None if cause is None else str(cause)

    def _whole(self, positions: Sequence[int]) -> float | None:
        """The loss of all samples at once; None where it proves nothing."""
        losses = [self._loss(positions) for _ in range(2)]
        if not all(map(math.isfinite, losses)) or losses[0] == 0:
            return None
        if abs(losses[0] - losses[1]) > _TOLERANCE * abs(losses[0]):
            warn(
                "the loss of the same samples differs each time (random numbers that are not torch's, or state "
                "that forward() changes), so how it weighs samples could not be checked"
            )
            return None
        return losses[0]

    def _loss(self, positions: Sequence[int]) -> float:
        batch = self._read(positions).tensors
        with controlled(NoDraws):
            return float(self._losses({key: value.clone() for key, value in batch.items()})[0].detach())

    def _read(self, positions: Sequence[int]) -> MicroBatch:
        key = tuple(position * self._each + number for position in positions for number in range(self._each))
        if key not in self._batches:
            self._batches[key] = self._source.micro_batch(key)
        return self._batches[key]

    def _error(self, positions: Sequence[int], whole: float) -> tuple[float, float]:
        """Relative: of the loss of parts, the larger one; and what rounding may be."""
        half = len(positions) // 2
        splits = [self._smallest(positions)]
        if self._model.sizes is None or self._model.sizes.samples is None:  # else micro-batches have one size
            splits.append([list(positions[:half]), list(positions[half:])])
        scale = max(abs(whole), 1e-30)
        errors = [abs(self._of_parts(split) - whole) / scale for split in splits if len(split) > 1]
        with self._scaled(1 + _NUDGE):
            moved = abs(self._loss(positions) - whole) / scale
        turned = abs(self._loss([*reversed(positions)]) - whole) / scale
        rounding = max(moved * 2.0**-24 / _NUDGE, turned, _LEAST)
        return max((error for error in errors if math.isfinite(error)), default=0.0), rounding

    def _smallest(self, positions: Sequence[int]) -> list[list[int]]:
        """In parts that are as small as the plain model takes."""
        ends = [*range(0, len(positions) - self._fewest + 1, self._fewest)]
        return [list(positions[start:end]) for start, end in itertools.pairwise([*ends, len(positions)])]

    def _of_parts(self, parts: Sequence[Sequence[int]]) -> float:
        """The loss as the engine computes it from micro-batches."""
        batches = [self._read(part) for part in parts]
        if self._model.whole is not None:
            return self._of_terms(batches)
        weights = [self._counted(batch) for batch in batches]
        pairs = [(self._loss(part), weight) for part, weight in zip(parts, weights, strict=True) if weight]
        total = math.fsum(weights)
        return math.fsum(loss * weight for loss, weight in pairs) / total if total else math.nan

    def _of_terms(self, batches: Sequence[MicroBatch]) -> float:
        if not self._in_fp32:
            return math.nan  # the sections compute in another precision than the plain model here
        first = batches[0]
        graph = self._model.graphs[variant_of(self._model, first.tensors, first.indices)]
        numbers = numbers_of(graph, [batch.tensors for batch in batches], self._initial.buffers)
        found = [
            self._captured(graph, Examples({**batch.tensors, **known}, rows_in(batch.tensors)))
            for batch, known in zip(batches, numbers, strict=True)
        ]
        return math.fsum(found)

    def _captured(self, graph: PartitionedModel, examples: Examples) -> float:
        """The loss that the sections make in turn."""
        crossings = {each.name: each for into in graph.split.crossings for each in into}
        values: dict[str, Tensor] = {}
        made: tuple[Tensor, ...] = ()
        for section in graph.sections:
            leaves = tuple(self._initial.parameters[name] for name in section.parameters)
            fixed = [self._initial.buffers[name] for name in section.buffers]
            fixed += [graph.constants[name] for name in section.constants]
            runner = SectionRunner(section, Tensors(leaves, tuple(fixed)), crossings, 0)
            with controlled(NoDraws):
                made = runner.forward(values, examples, 0, 0)
            values.update(zip(section.makes, made, strict=True))
        return float(made[0].detach())

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        before = [value.clone() for value in self._initial.parameters.values()]
        for value in self._initial.parameters.values():
            if value.is_floating_point():
                value.mul_(factor)
        try:
            yield
        finally:
            for value, old in zip(self._initial.parameters.values(), before, strict=True):
                value.copy_(old)

    def _otherwise(self, positions: Sequence[int]) -> list[int]:
        """Dataset indices of samples for which the module alone takes another way than the graph does."""
        found: list[int] = []
        for position in positions:
            batch = self._read([position])
            graph = self._model.graphs[variant_of(self._model, batch.tensors, batch.indices)]
            if self._fewest > 1 or graph.whole is not None or not self._in_fp32 or self._model.facts.batch_dependent:
                return []
            alone = self._loss([position])
            captured = self._captured(graph, Examples(batch.tensors, 1))
            if abs(alone - captured) > _TOLERANCE * abs(alone):
                found.extend(batch.indices)
        return found

    def _of_alone(self, indices: Sequence[int]) -> str | None:
        """The message about such samples, if there are any."""
        if not indices:
            return None
        return (
            f"forward() computes another loss for a sample alone than for the same sample among others (dataset "
            f"indices {list(indices)}): it asks something of the whole batch and goes another way, such as leaving out "
            "an attention mask in which no sample is padded. Over micro-batches the loss would depend on their size. "
            "Pass what it decides on in each sample (for some models of transformers that is token_type_ids or "
            "position_ids), or pad at least one place of every sample, or none."
        )

    def _message(self, positions: Sequence[int], whole: float) -> str:
        parts = self._of_parts(self._smallest(positions))
        indices = list(self._read(positions).indices)
        if self._weight is not None:
            counted = "weight(batch)"
            remedy = (
                "Let weight(batch) return what the loss averages over, such as (batch['labels'][:, 1:] != -100).sum(), "
                "or leave weight= out: Varuna then reads it from the loss."
            )
        else:
            counted = "the number of targets" if self._model.counts_targets else "examples"
            counted = "the count of each term" if self._model.whole is not None else counted
            remedy = (
                "Pass loss=varuna.Loss(..., weight=fn), where fn(batch) returns what the loss averages over, such as "
                "lambda batch: (batch['labels'][:, 1:] != -100).sum()."
            )
        if self._model.sizes is not None:
            remedy = f"{_JOINED} {remedy}"
        elif computes_over_batch(self._source):
            remedy = _OVER_BATCH
        remedy = without_autocast(what for what, *_ in self._model.operations) + remedy
        return (
            f"the loss of a batch is not the mean of its parts weighted by {counted}: for dataset indices "
            f"{indices} the whole gives {whole:.6g}, the parts {parts:.6g}. Micro-batches would train a different "
            f"model than the whole batch. {remedy}"
        )


_JOINED = (
    "collate= joins samples otherwise than as rows of a batch, so forward() itself must keep them apart: attention "
    "over a row of several needs position_ids that begin again with each (and a model that reads them), a graph a "
    "batch vector. If samples may meet, pass micro_batch= and loss=varuna.Loss(..., per_micro_batch=True). If they "
    "do not, the loss averages over something else."
)


_OVER_BATCH = (
    "collate= makes something else of a sample when others are beside it (a norm over the batch, a mix, weights by "
    "counts). Compute it in dataset[i]; or, if it may be over a micro-batch, pass micro_batch= and "
    "loss=varuna.Loss(..., per_micro_batch=True)."
)


def _counts(batch: MicroBatch) -> tuple[int, ...]:
    """Zeros and negative numbers among whole numbers: where masks and labels differ."""
    return tuple(int((value <= 0).sum()) for value in batch.tensors.values() if not value.is_floating_point())
