"""Before step 0: does the captured, cut, micro-batched computation train the user's module as plain PyTorch would?

On some of the first samples, unequal in their masks and labels, sections run in turn as the engine runs them. First
micro-batch by micro-batch against the module itself (what was captured), then their weighted sum against the whole
batch (what micro-batches make of it). In between, the loss's weighing is looked at by itself.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from varuna.checks import probes
from varuna.checks.assumptions import check_assumptions
from varuna.checks.causes import (
    CARRIED,
    COUNTERS,
    DRAWS,
    HOOKS,
    NOT_REPEATED,
    WRITTEN,
    continued,
    likely_words,
    refuse_certain,
    without_autocast,
)
from varuna.checks.compare import Errors, errors
from varuna.checks.draws import NoDraws, SameDraws
from varuna.checks.experiment import Experiment
from varuna.checks.extent import Extent, extent_of, of_at_least
from varuna.checks.loss_weight import check_weighing
from varuna.checks.mixing import try_mixing
from varuna.checks.module_state import changed, marks, plain_values
from varuna.checks.outcome import Outcome, Part
from varuna.checks.proportion import check_proportion
from varuna.checks.reading import Place, check_reading
from varuna.checks.samples import check_mixed_samples, choose_positions, computes_over_batch, read_twice
from varuna.checks.shapes_only import look_without_data
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.engine.device.capacity import usable_bytes
from varuna.partition.batch_weight import WeightFunction, numbers_of
from varuna.partition.capture.capture import Recipe
from varuna.partition.graph.costs import CPU_SLOWDOWN
from varuna.partition.graph.flow import is_random
from varuna.partition.graph.operations import op_name
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
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
            found, odd, reentrant = look_without_data(
                model, self.recipe, Part(batch.tensors, batch.indices, 1.0, numbers)
            )
        except Exception as error:  # noqa: BLE001 - the model's own code, which data would let pass
            return f"{too_large}, and running it without data failed ({type(error).__name__})", _ONCE
        names = ", ".join(each.name for each in odd[:3])
        finding = f"{len(odd)} parameters get no gradient ({names})." if odd else ""
        refuse_certain(found, finding)
        if odd:
            raise ModelError(continued(finding, likely_words(odd, model, reentrant)))
        return too_large, _ONCE

    def _run(
        self, model: PartitionedModel, initial: Initial, groups: Sequence[Sequence[int]], extent: Extent
    ) -> tuple[Errors, tuple[str, ...]]:
        """Compare on data; returns the largest errors, and what is left out."""
        experiment = Experiment(model, self.recipe, initial, self.source, self.weight)
        whole = self.micro_batch if self.per_micro_batch else None
        with experiment.running() as own:
            fewest = probes.fewest_samples(own.losses, self.source, whole or 2)
            sizes = extent.sizes
            enough = [positions for positions in groups if len(positions) >= fewest]
            # A data set of fewer samples than plain PyTorch takes is checked on the same ones again.
            groups = enough or [tuple(islice(cycle(groups[0]), fewest))]
            parts = own.parts(groups[0], of_at_least(sizes[: len(groups[0])], fewest))
            refuse_certain({CARRIED: probes.carried_attributes(own.losses, parts[0])})
        check_assumptions(experiment, self.micro_batch or 1)
        found, left_out = list[Errors](), list[str]()
        for positions in groups:
            read_twice(self.source, positions)
            with experiment.running() as own:
                parts = own.parts(positions, of_at_least(sizes[: len(positions)], fewest))
                found.append(self._captured(own, [part for part in parts if part.size >= fewest]))
        may_mix = model.sizes is not None or any(graph.mixing for graph in model.graphs)
        accepted = self.micro_batch is not None and self.per_micro_batch
        mixes = accepted and (may_mix or computes_over_batch(self.source))
        if not mixes:
            try_mixing(experiment, self.micro_batch, accepted=self.per_micro_batch)
            check_weighing(experiment, fewest)
        for positions in groups if extent.divides else ():
            if len(positions) > 1:
                with experiment.running() as own:
                    divided = _divided(own, own.parts(positions, sizes), own.part(positions))
                if isinstance(divided, str):
                    left_out.append(divided)
                else:
                    found.append(divided)
        return _worst(found), tuple(dict.fromkeys(left_out))

    def _captured(self, own: Experiment, parts: Sequence[Part]) -> Errors:
        """Sections against the module, micro-batch by micro-batch, dropout and all."""
        module, losses = own.initial.module, own.losses
        refuse_certain({HOOKS: gradient_hooks(module)})
        begun = replace(own.initial, buffers={name: value.clone() for name, value in own.initial.buffers.items()})
        numbers, unwritten = plain_values(module), marks(module)
        around = [(place, place.value()) for place in self.numbers_around()]
        expected = own.plainly(parts)
        if own.model.trainable and not expected.gradients and any(part.weight for part in parts):
            raise ModelError(
                "no parameter gets a gradient from the loss, in plain PyTorch either, whose backward() would fail. "
                "Look for detach(), item(), argmax() or torch.no_grad() in forward() and loss=."
            )
        counted = changed(numbers, plain_values(module))
        refuse_certain(
            {
                HOOKS: expected.seen.hooks,
                WRITTEN: [name for name, mark in marks(module).items() if mark != unwritten[name]],
                DRAWS: probes.deciding_draws(losses, parts[0], expected.seen),
                COUNTERS: (
                    *probes.deciding_counters(losses, parts[0], counted),
                    *probes.deciding_places(losses, parts[0], around),
                ),
            }
        )
        check_proportion(own, parts[0])
        found = replace(own, initial=begun).in_turn(parts)
        if odd := own.differences(found, expected):
            if not any(own.differences(own.plainly(parts), expected) for _ in range(2)):
                odd = own.differences(found, expected, probes.noise(losses, parts, expected, SameDraws))
                words = likely_words(odd, own.model, expected.seen.reentrant)
            else:
                words = COUNTERS.told([*counted]) if counted else NOT_REPEATED.told()
            if odd:
                raise ModelError(continued(f"{own.described(odd, parts)}.", words))
        return errors(found, expected)


def _divided(own: Experiment, parts: Sequence[Part], whole: Part) -> Errors | str:
    """The weighted sum over micro-batches against the whole batch; nothing is drawn, since shapes differ.

    A text says why they cannot be compared.
    """
    draws, parts = NoDraws(), own.adding_up(parts)
    if not sum(part.weight for part in parts):
        return "micro-batches with the whole batch, because the samples have no targets"
    batch = [Part(whole.tensors, whole.indices, 1.0)]
    found = _of_whole_batch(own.model, own.in_turn(parts, draws=lambda: draws, at_once=True))
    expected = _of_whole_batch(own.model, own.plainly(batch, draws=lambda: draws))
    if draws.drawn:
        return f"micro-batches with the whole batch, because {', '.join(sorted(draws.drawn))} draws"
    odd = own.differences(found, expected)
    odd = odd and own.differences(found, expected, probes.noise(own.losses, batch, expected, lambda: draws))
    if odd:
        advice = without_autocast(what for what, *_ in own.model.operations)
        raise ModelError(
            "the micro-batches of a batch do not train like the whole batch: "
            f"{own.described(odd, batch)}, when micro-batches are weighted by their counts. "
            f"{advice}{'Or something' if advice else 'Something'} in the loss or the model compares samples "
            "with each other, or averages over something else. Pass loss=varuna.Loss(..., weight=fn), where "
            "fn(batch) returns what the loss averages over, or "
            "micro_batch=, the number of samples that belong together, and "
            "loss=varuna.Loss(..., per_micro_batch=True)."
        )
    return errors(found, expected)


def _of_whole_batch(model: PartitionedModel, outcome: Outcome) -> Outcome:
    """Return the part that depends on no division of the batch: gradients, and buffers updated once a step."""
    updates = (update for section in model.sections for update in section.updates if update.kinds is not None)
    names = [name for update in updates for name in update.buffers]
    return replace(outcome, losses=(), metrics={}, buffers={name: outcome.buffers[name] for name in names})


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


def _worst(found: Iterable[Errors]) -> Errors:
    by_gradient = max(found, key=lambda each: each.gradient)
    return replace(by_gradient, loss=max(each.loss for each in found))
