"""Before step 0: does the captured, cut, micro-batched computation train the user's module as plain PyTorch would?

On some of the first samples, unequal in their masks and labels, sections run in turn as the engine runs them. First
micro-batch by micro-batch against the module itself (what was captured), then their weighted sum against the whole
batch (what micro-batches make of it). In between, the loss's weighing is looked at by itself.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from varuna.checks import probes
from varuna.checks.assumptions import check_assumptions
from varuna.checks.autocast import without_autocast
from varuna.checks.cause import Cause, Evidence, cause_of, refused
from varuna.checks.compare import TOLERANCES, Difference, Errors, Tolerance, coarsest, differences, errors
from varuna.checks.draws import NoDraws, SameDraws
from varuna.checks.extent import Extent, extent_of, of_at_least
from varuna.checks.loss_weight import check_weighing
from varuna.checks.mixing import try_mixing
from varuna.checks.module_state import changed, marks, plain_values
from varuna.checks.outcome import Draws, Outcome, Part, in_turn, plainly
from varuna.checks.proportion import check_proportion
from varuna.checks.reading import Place, check_reading
from varuna.checks.samples import (
    OutsideModesSource,
    check_mixed_samples,
    choose_positions,
    computes_over_batch,
    read_twice,
)
from varuna.checks.shapes_only import look_over
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.engine.device.capacity import usable_bytes
from varuna.partition.batch_layout import check_inputs
from varuna.partition.batch_weight import WeightFunction, numbers_of, weight_of
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.graph.costs import CPU_SLOWDOWN
from varuna.partition.graph.flow import is_random
from varuna.partition.graph.operations import op_name
from varuna.partition.graph.ranges import check_ranges
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.opaque.calls import drawing_as_operations
from varuna.partition.watching.side_effects import gradient_hooks
from varuna.process.console import note, say


@dataclass(frozen=True)
class Checked:
    """The extent of a check, and the figures that it found."""

    samples: int
    seconds: float
    errors: Errors | None
    """None: the model was looked at without data"""
    left_out: tuple[str, ...] = ()
    """parts that were not compared, each with the reason"""

    def __str__(self) -> str:
        left_out = f" (not compared: {'; '.join(self.left_out)})" if self.left_out else ""
        if self.errors is None:
            return f"the model was checked without data in {self.seconds:.1f} s{left_out}"
        return (
            f"checked against plain PyTorch on {self.samples} sample{'s' * (self.samples != 1)} in {self.seconds:.1f} "
            f"s: loss {self.errors.loss:.0e}, gradients {self.errors.gradient:.0e}{left_out}"
        )


@dataclass(frozen=True)
class SelfCheck:
    """The check of one job."""

    recipe: Recipe
    source: SampleSource
    weight: WeightFunction | None
    """the user's weight of a micro-batch, if any"""
    micro_batch: int | None
    """examples, if the user fixed it"""
    per_micro_batch: bool = False
    """the loss may mix the examples of a micro-batch of that size"""
    device: str = "cpu"
    """the kind of device that the job computes on, and that the model's nominal times are of"""
    numbers: Callable[[], Iterable[Place]] = tuple
    """that the dataset and ``collate`` may count with"""
    numbers_around: Callable[[], Iterable[Place]] = tuple
    """beside those of modules, that forward, ``loss=`` and ``metrics=`` may count with"""
    notes: Callable[[], Iterable[str]] = tuple
    """lines for people, before step 0"""

    def run(self, model: PartitionedModel, initial: Initial | None) -> None:
        """Run all checks before a fresh run, on a whole model that is not needed afterwards; prints the result.

        Without ``initial``, nobody has the memory for all of the model.

        Raises:
            ModelError: the run would train another model than plain PyTorch.
            DataError: the dataset is random, or a sample is not what was captured.
        """
        for path, why in model.eager.items():
            say(f"{path} runs as written, as one operation that is never cut: {why}")
        for name in self.source.setters:
            unit = "pass over the dataset" if name == "set_epoch" else "step"
            note(f"{name}() of the dataset is called with the {unit} of the sample that is read next")
        if drawn := _drawn(model):
            note(f"forward() or loss= draws random numbers ({', '.join(drawn)}), {OTHER_DRAWS}")
        for each in self.notes():
            note(each)
        say(str(self.compare(model, initial)))

    def compare(self, model: PartitionedModel, initial: Initial | None) -> Checked:
        """Run the comparison with plain PyTorch, and return its figures.

        Args:
            model: as captured.
            initial: the whole model, in fp32, if it may be run.

        Raises:
            ModelError: they differ.
            DataError: the dataset is random, or a sample is not what was captured.
        """
        begin_s = time.monotonic()
        check_reading(self.source, self.numbers)
        check_mixed_samples(self.source)
        extent = self._extent(model)
        groups = choose_positions(model, self.source, sum(extent.sizes) or 1)
        if initial is None or not extent.sizes:
            left_out = self._look_over(model, groups[0])
            return Checked(len(groups[0]), time.monotonic() - begin_s, None, left_out)
        with _threads(extent):
            errors, left_out = self._run(model, initial, groups, extent)
        return Checked(sum(map(len, groups)), time.monotonic() - begin_s, errors, left_out)

    def _extent(self, model: PartitionedModel) -> Extent:
        return extent_of(
            model.facts,
            micro_batch=self.micro_batch,
            slowdown=1.0 if self.device == "cpu" else CPU_SLOWDOWN,
            cores=_cores(),
            free_bytes=usable_bytes(torch.device("cpu"), 1) or math.inf,
            exactly=model.sizes is not None and model.sizes.samples is not None,
            divides=model.sizes is not None and not model.facts.batch_dependent and not self.per_micro_batch,
        )

    def _look_over(self, model: PartitionedModel, positions: Sequence[int]) -> tuple[str, ...]:
        """Look the model over without data; returns what is left out."""
        batch = read_twice(self.source, positions)
        too_large = "losses, gradients and buffers, and the weights of micro-batches, because the model is too large"
        try:
            graph = model.graphs[variant_of(model, batch.tensors, batch.indices)]
            (numbers,) = numbers_of(graph, [batch.tensors], {})
            evidence = look_over(model, self.recipe, Part(batch.tensors, batch.indices, 1.0, numbers))
        except Exception as error:  # noqa: BLE001 - the model's own code, which data would let pass
            return f"{too_large}, and running it without data failed ({type(error).__name__})", _ONCE
        if evidence.differences:
            names = ", ".join(each.name for each in evidence.differences[:3])
            _refuse(cause_of(evidence), f"{len(evidence.differences)} parameters get no gradient ({names}). ")
        _refuse(refused(evidence))
        return too_large, _ONCE

    def _run(
        self, model: PartitionedModel, initial: Initial, groups: Sequence[Sequence[int]], extent: Extent
    ) -> tuple[Errors, tuple[str, ...]]:
        """Compare on data; returns the largest errors, and what is left out."""
        with probes.computing(initial, self.recipe.dtype) as own:
            whole = self.micro_batch if self.per_micro_batch else None
            fewest = probes.fewest(LossModule(own.module, self.recipe), self.source, whole or 2)
        check = _Check(self, model, initial, extent.sizes, fewest)
        groups = [positions for positions in groups if len(positions) >= fewest]
        check.carried(groups[0])
        check_assumptions(model, self.recipe, initial, self.source, self.micro_batch or 1)
        found, left_out = [check.captured(positions) for positions in groups], list[str]()
        may_mix = model.sizes is not None or any(graph.mixing for graph in model.graphs)
        accepted = self.micro_batch is not None and self.per_micro_batch
        mixes = accepted and (may_mix or computes_over_batch(self.source))
        if not mixes:
            try_mixing(model, self.recipe, initial, self.source, self.micro_batch, accepted=self.per_micro_batch)
            check_weighing(model, self.recipe, initial, OutsideModesSource(self.source), self.weight, fewest)
        for divided in (check.divided(positions) for positions in groups if len(positions) > 1 and extent.divides):
            if isinstance(divided, str):
                left_out.append(divided)
            else:
                found.append(divided)
        if not found:
            left_out.append(f"single samples, because plain PyTorch takes {fewest} at least")
        return _worst(found) if found else Errors(0.0, 0.0, ""), tuple(dict.fromkeys(left_out))


def _drawn(model: PartitionedModel) -> list[str]:
    """Names of torch's operations that draw."""
    nodes = (node for section in model.sections for node in section.module.graph.nodes if is_random(node))
    names = (op_name(node).partition("::") for node in nodes)
    return sorted({name.removeprefix("native_") for space, _, name in names if space == "aten"})


OTHER_DRAWS = "which Varuna seeds for each step: losses are those of another seed than a plain loop's"
_ONCE = "check it once in a smaller configuration, with varuna inspect --verify"
_WORTH_THREADS_S = 2.0


def _cores() -> int:
    """Number of cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _threads(extent: Extent) -> Iterator[None]:
    """In this block, use all cores if the check takes long, since other workers wait; training sets its own number."""
    before = torch.get_num_threads()
    if extent.estimate_s > _WORTH_THREADS_S:
        torch.set_num_threads(max(before, _cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refuse(cause: Cause | None, finding: str = "") -> None:
    if cause is not None:
        what = f"{cause.what[0].upper()}{cause.what[1:]}" if finding else cause.what
        raise ModelError(f"{finding}{what} {cause.remedy}")


def _worst(found: Iterable[Errors]) -> Errors:
    by_gradient = max(found, key=lambda each: each.gradient)
    return replace(by_gradient, loss=max(each.loss for each in found))


@dataclass(frozen=True)
class _Check:
    """The check of one model on data."""

    job: SelfCheck
    model: PartitionedModel
    initial: Initial
    sizes: tuple[int, ...]
    """samples of each micro-batch"""
    fewest: int
    """samples that the plain model needs"""

    def carried(self, positions: Sequence[int]) -> None:
        """Refuse a module that goes on from what it left when it ran before."""
        with self._as_it_trains() as initial:
            losses = LossModule(initial.module, self.job.recipe)
            sizes = of_at_least(self.sizes[: len(positions)], self.fewest)
            _refuse(refused(Evidence(carried=probes.carried(losses, self._parts(positions, initial, sizes)[0]))))

    # -- what was captured -----------------------------------------------------------------------------------

    def captured(self, positions: Sequence[int]) -> Errors:
        """Sections against the module, micro-batch by micro-batch, dropout and all."""
        read_twice(self.job.source, positions)
        with self._as_it_trains() as initial:
            losses = LossModule(initial.module, self.job.recipe)
            sizes = of_at_least(self.sizes[: len(positions)], self.fewest)
            parts = [part for part in self._parts(positions, initial, sizes) if part.size >= self.fewest]
            _refuse(refused(Evidence(hooks=tuple(gradient_hooks(initial.module)))))
            begun = replace(initial, buffers={name: value.clone() for name, value in initial.buffers.items()})
            numbers, unwritten = plain_values(initial.module), marks(initial.module)
            around = [(place, place.value()) for place in self.job.numbers_around()]
            expected = plainly(losses, parts)
            if self.model.trainable and not expected.gradients and any(part.weight for part in parts):
                raise ModelError(
                    "no parameter gets a gradient from the loss, in plain PyTorch either, whose backward() would fail. "
                    "Look for detach(), item(), argmax() or torch.no_grad() in forward() and loss=."
                )
            written = [name for name, mark in marks(initial.module).items() if mark != unwritten[name]]
            counted = changed(numbers, plain_values(initial.module))
            evidence = Evidence(
                hooks=tuple(expected.seen.hooks),
                written=tuple(written),
                draws=probes.deciding_draws(losses, parts[0], expected.seen),
                counters=(
                    *probes.deciding_counters(losses, parts[0], counted),
                    *probes.deciding_places(losses, parts[0], around),
                ),
                reentrant=tuple(expected.seen.reentrant),
            )
            _refuse(refused(evidence))
            check_proportion(self.model, losses, parts[0])
            found = in_turn(self.model, begun, parts)
            odd = differences(found, expected, self._tolerance)
            if odd:
                repeats = probes.repeats(losses, parts, expected, self._tolerance)
                if repeats:
                    odd = self._beyond_noise(losses, parts, found, expected, SameDraws)
                evidence = replace(
                    evidence,
                    repeats=repeats,
                    counters=() if repeats else tuple(counted),
                    complex_values=probes.complex_values(self.model),
                    strided=probes.strided(self.model),
                    differences=odd,
                )
            if odd:
                _refuse(cause_of(evidence), f"{self._described(odd, parts)}. ")
            return errors(found, expected)

    # -- what micro-batches make of it -----------------------------------------------------------------------

    def divided(self, positions: Sequence[int]) -> Errors | str:
        """The weighted sum over micro-batches against the whole batch; nothing is drawn, since shapes differ.

        A text says why they cannot be compared.
        """
        draws = NoDraws()
        with self._as_it_trains() as initial:
            losses = LossModule(initial.module, self.job.recipe)
            parts = self._parts(positions, initial, self.sizes)
            batch = self.job.source.micro_batch(list(positions))
            whole = [Part(batch.tensors, batch.indices, 1.0)]
            parts = self._adding_up(parts, initial)
            if not sum(part.weight for part in parts):
                return "micro-batches with the whole batch, because the samples have no targets"
            fixed = partial(_again, draws)
            found = self._of_whole_batch(in_turn(self.model, initial, parts, draws=fixed, at_once=True))
            expected = self._of_whole_batch(plainly(losses, whole, draws=fixed))
            if draws.drawn:
                return f"micro-batches with the whole batch, because {', '.join(sorted(draws.drawn))} draws"
            odd = differences(found, expected, self._tolerance)
            odd = odd and self._beyond_noise(losses, whole, found, expected, fixed)
            if odd:
                advice = without_autocast(what for what, *_ in self.model.operations)
                raise ModelError(
                    "the micro-batches of a batch do not train like the whole batch: "
                    f"{self._described(odd, whole)}, when micro-batches are weighted by their counts. "
                    f"{advice}{'Or something' if advice else 'Something'} in the loss or the model compares samples "
                    "with each other, or averages over something else. Pass loss=varuna.Loss(..., weight=fn), where "
                    "fn(batch) returns what the loss averages over, or "
                    "micro_batch=, the number of samples that belong together, and "
                    "loss=varuna.Loss(..., per_micro_batch=True)."
                )
            return errors(found, expected)

    def _of_whole_batch(self, outcome: Outcome) -> Outcome:
        """Return the part that depends on no division of the batch: gradients, and buffers updated once a step."""
        updates = (update for section in self.model.sections for update in section.updates if update.kinds is not None)
        names = [name for update in updates for name in update.buffers]
        return replace(outcome, losses=(), metrics={}, buffers={name: outcome.buffers[name] for name in names})

    # -- inside ----------------------------------------------------------------------------------------------

    @contextmanager
    def _as_it_trains(self) -> Iterator[Initial]:
        """The whole model in the run's precision; where sections run its modules as written, they draw alike."""
        with (
            probes.computing(self.initial, self.job.recipe.dtype) as initial,
            drawing_as_operations(initial.module, self.model.eager),
        ):
            yield initial

    def _parts(self, positions: Sequence[int], initial: Initial, sizes: Sequence[int]) -> list[Part]:
        """Micro-batches, as far as there are samples."""
        ends = list(itertools.accumulate(sizes, initial=0))
        spans = [positions[start:end] for start, end in itertools.pairwise(ends)]
        return [self._part(span, initial) for span in spans if span]

    def _adding_up(self, parts: Sequence[Part], initial: Initial) -> list[Part]:
        """Parts with numbers of the whole batch, where the terms of the loss count different things."""
        batches = [part.tensors for part in parts]
        graph = self.model.graphs[variant_of(self.model, batches[0], parts[0].indices)]
        if graph.whole is None:
            return list(parts)
        numbers = numbers_of(graph, batches, initial.buffers)
        each = zip(parts, numbers, strict=True)
        return [replace(part, weight=1.0, numbers=known, adds_up=True) for part, known in each]

    def _part(self, positions: Sequence[int], initial: Initial) -> Part:
        batch = self.job.source.micro_batch(list(positions))
        graph = self.model.graphs[variant_of(self.model, batch.tensors, batch.indices)]
        check_inputs(graph.inputs, batch.tensors, batch.indices)
        check_ranges(graph.ranges, batch.tensors, batch.indices)
        weight = weight_of(self.model, self.job.weight, batch.tensors, initial.buffers)
        numbers: dict[str, Tensor] = {}
        if graph.whole is not None:
            (numbers,) = numbers_of(graph, [batch.tensors], initial.buffers)
            weight *= all(bool((number != 0).all()) for number in numbers.values())  # the mean of nothing is NaN
        return Part(batch.tensors, batch.indices, weight, numbers)

    @property
    def _tolerance(self) -> Tolerance:
        return TOLERANCES[coarsest(self.job.recipe.dtype, *self.model.dtypes.values())]

    def _beyond_noise(
        self, losses: LossModule, parts: Sequence[Part], found: Outcome, expected: Outcome, draws: Draws
    ) -> list[Difference]:
        """Return the differences beyond those of plain PyTorch itself when the last bits of its parameters move."""
        noise = probes.noise(losses, parts, expected, draws)
        return differences(found, expected, self._tolerance, noise)

    def _described(self, odd: Sequence[Difference], parts: Sequence[Part]) -> str:
        indices = [index for part in parts for index in part.indices]
        others = f" (and {len(odd) - 1} other differences)" if len(odd) > 1 else ""
        return f"for dataset indices {indices}, {self._one(odd[0])}{others}"

    def _one(self, each: Difference) -> str:
        if each.what == "loss":
            return f"the captured model's loss is {each.found:.7g}, plain PyTorch's {each.expected:.7g}"
        if each.what == "metric":
            return f"{each.name} of metrics= is {each.found:.7g} as captured, {each.expected:.7g} in plain PyTorch"
        place = f"{each.name} (in {probes.named(self.initial.module, each.name)}{self._section_of(each.name)})"
        if each.missing:
            return f"{place} gets no gradient in the captured model, but one of {each.expected:.3g} in plain PyTorch"
        if each.what == "buffer":
            return f"the buffer {place} differs by {each.error:.1%} after the step from plain PyTorch's"
        return (
            f"the gradient of {place} differs from plain PyTorch's by {each.error:.1%} of the model's largest gradient"
        )

    def _section_of(self, name: str) -> str:
        found = [section.index for section in self.model.sections if name in section.parameters]
        return f", section {found[0]}" if found else ""


def _again(draws: NoDraws) -> NoDraws:
    """A context manager that enters ``mode`` anew each time."""
    return draws
