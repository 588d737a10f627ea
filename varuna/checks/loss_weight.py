"""The check at the start of a run: is the loss of a batch the weighted mean of the losses of its parts?

The weight follows from the graph (``partition.loss.terms``), or is the user's. This is the second look: some samples at
once, one by one and in halves, as the model is and with parameters magnified, since a fresh model finds all samples
about equally hard, and hides the error.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from varuna.checks.causes import DRAWS, certain_words, without_autocast
from varuna.checks.draws import NoDraws
from varuna.checks.experiment import Experiment
from varuna.checks.outcome import Part, controlled, run_plainly
from varuna.checks.samples import computes_over_batch
from varuna.core.errors import ModelError
from varuna.data.samples import LOOKED_AT
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


def check_weighing(experiment: Experiment, fewest: int = 1) -> None:
    """Compare one batch of samples, unequal if there are such, with its weighted parts.

    Args:
        experiment: of the job.
        fewest: samples that the plain model needs.

    Raises:
        ModelError: they differ, so the loss would depend on P, D and m.
        DataError: a sample is not shaped like those that were captured.
    """
    try:
        with experiment.running(torch.float32, widened=True) as own:
            if len(singles := _unlike(own)) < 2 * fewest:
                return
            if own.model.facts.batch_dependent:
                own.initial.module.eval()
            in_fp32 = experiment.recipe.dtype is torch.float32 and not own.model.dtypes
            found = _Weighing(own, singles, fewest, in_fp32).run()
    except RuntimeError as error:
        if not experiment.model.dtypes:
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
        warn(f"how the loss weighs samples could not be checked: with all parameters in fp32 the model fails ({why})")
        return
    if found is not None:
        raise ModelError(found)


def _unlike(own: Experiment) -> dict[int, Part]:
    """Position -> sample, all of one length: first those that weigh or count differently, then others.

    Where batches are lists of samples: numbers of lists.
    """
    is_large = sum(value.numel() for value in own.initial.parameters.values()) >= _LARGE
    looked_at, size = LOOKED_AT if own.source.size is None else min(LOOKED_AT, own.source.size), _list_size(own)
    first: PartitionedModel | None = None
    seen: dict[object, int] = {}
    found: dict[int, Part] = {}
    for position in range(looked_at if size == 1 else max(2, looked_at // size)):  # one list would have no parts
        part = _read(own, [position])
        graph = own.graph_of(part)
        if first is not None and graph is not first:
            continue
        first = graph
        if part.weight > 0 or own.model.whole is not None:
            seen.setdefault((part.weight, _counts(part)), position)
        found[position] = part
    chosen = [*dict.fromkeys([*seen.values(), *found])][: _COMPARED_OF_LARGE if is_large else _COMPARED]
    return {position: found[position] for position in chosen}


def _list_size(own: Experiment) -> int:
    sizes = own.model.sizes
    return 1 if sizes is None or sizes.samples is None else sizes.samples


def _read(own: Experiment, positions: Sequence[int]) -> Part:
    size = _list_size(own)
    return own.part([position * size + number for position in positions for number in range(size)])


def _counts(part: Part) -> tuple[int, ...]:
    """Zeros and negative numbers among whole numbers: where masks and labels differ."""
    return tuple(int((value <= 0).sum()) for value in part.tensors.values() if not value.is_floating_point())


@dataclass(frozen=True)
class _Weighing:
    """The comparison of one batch with its parts."""

    own: Experiment
    """in fp32"""
    singles: Mapping[int, Part]
    """its samples, by position"""
    fewest: int
    in_fp32: bool
    """the run is in fp32, too, so its sections may be compared"""

    @property
    def positions(self) -> list[int]:
        """Positions of all samples."""
        return [*self.singles]

    @cached_property
    def whole(self) -> Part:
        """All samples."""
        return _read(self.own, self.positions)

    @cached_property
    def turned(self) -> Part:
        """All samples, in another order."""
        return _read(self.own, [*reversed(self.positions)])

    @cached_property
    def smallest(self) -> list[Part]:
        """Parts that are as small as the plain model takes."""
        ends = [*range(0, len(self.positions) - self.fewest + 1, self.fewest)]
        return self._read_between([*ends, len(self.positions)])

    @cached_property
    def splits(self) -> list[list[Part]]:
        """Divisions of the batch."""
        if self.own.model.sizes is not None and self.own.model.sizes.samples is not None:
            return [self.smallest]  # micro-batches have one size
        return [self.smallest, self._read_between([0, len(self.positions) // 2, len(self.positions)])]

    def _read_between(self, ends: Sequence[int]) -> list[Part]:
        spans = [self.positions[start:end] for start, end in itertools.pairwise(ends)]
        return [self.singles[span[0]] if len(span) == 1 else _read(self.own, span) for span in spans]

    def run(self) -> str | None:
        """A message about what is wrong; None if nothing is."""
        plain = self._whole()
        if plain is None:
            return None
        error, rounding = self._error(plain)
        magnified = rounded = 0.0
        with self._scaled(4.0):
            large = self._whole()
            if large is not None:
                magnified, rounded = self._error(large)
        is_certain = error > max(_TOLERANCE, _CERTAIN * rounding)
        shown = magnified > max(_TOLERANCE, _CERTAIN * rounded) and error > _CERTAIN * max(rounding, _LEAST)
        if not (is_certain or shown):
            return None
        with watched() as seen:
            self._loss(self.whole)
        return certain_words({DRAWS: seen.draws}) or self._of_alone() or self._message(plain)

    def _whole(self) -> float | None:
        """The loss of all samples at once; None where it proves nothing."""
        losses = [self._loss(self.whole) for _ in range(2)]
        if not all(map(math.isfinite, losses)) or losses[0] == 0:
            return None
        if abs(losses[0] - losses[1]) > _TOLERANCE * abs(losses[0]):
            warn(
                "the loss of the same samples differs each time (random numbers that are not torch's, or state "
                "that forward() changes), so how it weighs samples could not be checked"
            )
            return None
        return losses[0]

    def _loss(self, part: Part) -> float:
        with controlled(NoDraws):
            return float(run_plainly(self.own.losses, part)[0].detach())

    def _error(self, whole: float) -> tuple[float, float]:
        """Relative: of the loss of parts, the larger one; and what rounding may be."""
        scale = max(abs(whole), 1e-30)
        errors = [abs(self._of_parts(split) - whole) / scale for split in self.splits if len(split) > 1]
        with self._scaled(1 + _NUDGE):
            moved = abs(self._loss(self.whole) - whole) / scale
        turned = abs(self._loss(self.turned) - whole) / scale
        rounding = max(moved * 2.0**-24 / _NUDGE, turned, _LEAST)
        return max((error for error in errors if math.isfinite(error)), default=0.0), rounding

    def _of_parts(self, parts: Sequence[Part]) -> float:
        """The loss as the engine computes it from micro-batches."""
        if self.own.model.whole is not None:  # else the sections compute in another precision than the plain model
            return math.fsum(self._of_sections(self.own.adding_up(parts))) if self.in_fp32 else math.nan
        pairs = [(self._loss(part), part.weight) for part in parts if part.weight]
        total = math.fsum(weight for _, weight in pairs)
        return math.fsum(loss * weight for loss, weight in pairs) / total if total else math.nan

    def _of_sections(self, parts: Sequence[Part]) -> tuple[float, ...]:
        return self.own.losses_in_turn(parts, draws=NoDraws)

    @contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        values = self.own.initial.parameters.values()
        before = [value.clone() for value in values]
        for value in values:
            if value.is_floating_point():
                value.mul_(factor)
        try:
            yield
        finally:
            for value, old in zip(values, before, strict=True):
                value.copy_(old)

    def _of_alone(self) -> str | None:
        """The message about samples for which the module alone takes another way than the graph, if there are any."""
        model = self.own.model
        if self.fewest > 1 or model.whole is not None or not self.in_fp32 or model.facts.batch_dependent:
            return None
        alone = [self._loss(part) for part in self.smallest]
        each = zip(self.smallest, alone, self._of_sections(self.smallest), strict=True)
        odd = [part.indices for part, loss, captured in each if abs(loss - captured) > _TOLERANCE * abs(loss)]
        if not odd:
            return None
        return (
            f"forward() computes another loss for a sample alone than for the same sample among others (dataset "
            f"indices {[*itertools.chain(*odd)]}): it asks something of the whole batch and goes another way, such as "
            "leaving out an attention mask in which no sample is padded. Over micro-batches the loss would depend on "
            "their size. "
            "Pass what it decides on in each sample (for some models of transformers that is token_type_ids or "
            "position_ids), or pad at least one place of every sample, or none."
        )

    def _message(self, whole: float) -> str:
        model, parts = self.own.model, self._of_parts(self.smallest)
        indices = list(self.whole.indices)
        if self.own.weight is not None:
            counted = "weight(batch)"
            remedy = (
                "Let weight(batch) return what the loss averages over, such as (batch['labels'][:, 1:] != -100).sum(), "
                "or leave weight= out: Varuna then reads it from the loss."
            )
        else:
            counted = "the number of targets" if model.counts_targets else "examples"
            counted = "the count of each term" if model.whole is not None else counted
            remedy = (
                "Pass loss=varuna.Loss(..., weight=fn), where fn(batch) returns what the loss averages over, such as "
                "lambda batch: (batch['labels'][:, 1:] != -100).sum()."
            )
        if model.sizes is not None:
            remedy = f"{_JOINED} {remedy}"
        elif computes_over_batch(self.own.source):
            remedy = _OVER_BATCH
        remedy = without_autocast(what for what, *_ in model.operations) + remedy
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
