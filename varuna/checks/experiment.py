"""The experiment that the checks before step 0 are made of: run A, run B, compare, find the cause.

A is the user's module, run by autograd; B is what Varuna makes of it. Both are given the same samples, as micro-batches
(``outcome.Part``), in training mode, and draw the same (``draws.SameDraws``) or nothing (``draws.NoDraws``).

====================  ===========================  ==========================  ==========  =========================
Checked by            A                            B                           Draws       Compared, tolerance
====================  ===========================  ==========================  ==========  =========================
selfcheck.captured    module, each micro-batch     sections in turn            same        all of ``outcome.Outcome``,
                                                                                           by dtype, then A's noise
selfcheck.divided     module, whole batch          sections, weighted parts    nothing     loss, gradients, buffers of
                                                                                           the step; the same
loss_weight           module in fp32, whole batch  module, weighted parts;     nothing     loss, 2e-5 and A's noise;
                                                   sections if terms count     drawn       also with larger parameters
                                                   different things
assumptions           module, loops as written     module, loops over all      same        all of it, 1e-4
mixing                doubtful operations          with another last example   nothing     the others' values
proportion            backward of 1                backward of 4, of 1024      same        Functions' gradients, 1e-3
probes                module                       module, run again, or with  same        loss, to the bit
                                                   another draw or number
shapes_only           module without data          sections without data       -           who gets a gradient
update                update on one stage          on several, after a move    seeded      parameters and state, 1e-4
remembering           a function of the user's     called before               seeded      to the bit
reading               samples                      read again, counts ahead    seeded      to the bit
====================  ===========================  ==========================  ==========  =========================

What is found has a cause, with its test and its words, in ``causes``.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from varuna.checks.compare import TOLERANCES, Difference, Noise, Tolerance, coarsest, differences
from varuna.checks.draws import SameDraws
from varuna.checks.outcome import Draws, Outcome, Part, in_turn, plainly, same_buffers
from varuna.data.samples import MicroBatch, SampleSource
from varuna.engine.stage.precision import cast
from varuna.partition.batch_layout import check_inputs
from varuna.partition.batch_weight import WeightFunction, numbers_of, weight_of
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.capture.dtypes import HALVES
from varuna.partition.graph.ranges import check_ranges
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.opaque.calls import drawing_as_operations
from varuna.partition.originals.modes import into_training


@dataclass(frozen=True)
class Experiment:
    """A job's model, as its user wrote it and as it was captured, to be run on the same samples."""

    model: PartitionedModel
    recipe: Recipe
    initial: Initial
    """the whole model with initial values"""
    source: SampleSource
    weight: WeightFunction | None = None
    """the user's weight of a micro-batch, if any"""

    @contextmanager
    def running(self, dtype: torch.dtype | None = None, *, widened: bool = False) -> Iterator["Experiment"]:
        """The experiment with the model in training mode and a compute dtype; values and modes come back to the bit.

        Args:
            dtype: of computation; None: the run's. In fp32 each parameter keeps its own.
            widened: none does, all are fp32.
        """
        dtype, module = dtype or self.recipe.dtype, self.initial.module
        parameters = {name: value.data for name, value in module.named_parameters()}
        modes = [(each, each.training) for each in module.modules()]
        with same_buffers(module), drawing_as_operations(module, self.model.eager):
            into_training(module)
            if dtype is not torch.float32:
                module._apply(lambda value: cast(value, dtype))  # type: ignore[no-untyped-call]
            elif widened:
                module._apply(lambda value: value.float() if value.dtype in HALVES else value)  # type: ignore[no-untyped-call]
            values = {name: value.detach() for name, value in module.named_parameters()}
            own = Initial(module, values, dict(module.named_buffers(remove_duplicate=False)))
            try:
                yield replace(self, initial=own, recipe=replace(self.recipe, dtype=dtype))
            finally:
                for name, parameter in module.named_parameters():
                    parameter.data = parameters[name]
                for each, mode in modes:
                    each.training = mode

    # -- samples ---------------------------------------------------------------------------------------------

    def graph_of(self, batch: MicroBatch | Part) -> PartitionedModel:
        """The graph for samples of that length."""
        return self.model.graphs[variant_of(self.model, batch.tensors, batch.indices)]

    def part(self, positions: Sequence[int]) -> Part:
        """Read a micro-batch, with its weight.

        Raises:
            DataError: a sample is not shaped like those that were captured, or has a number out of range.
        """
        batch = self.source.micro_batch(list(positions))
        graph = self.graph_of(batch)
        check_inputs(graph.inputs, batch.tensors, batch.indices)
        check_ranges(graph.ranges, batch.tensors, batch.indices)
        weight = weight_of(self.model, self.weight, batch.tensors, self.initial.buffers)
        (numbers,) = numbers_of(graph, [batch.tensors], self.initial.buffers)
        weight *= all(bool((number != 0).all()) for number in numbers.values())  # the mean of nothing is NaN
        return Part(batch.tensors, batch.indices, weight, numbers)

    def parts(self, positions: Sequence[int], sizes: Sequence[int]) -> list[Part]:
        """Read micro-batches, as far as there are samples."""
        ends = list(itertools.accumulate(sizes, initial=0))
        spans = [positions[start:end] for start, end in itertools.pairwise(ends)]
        return [self.part(span) for span in spans if span]

    def adding_up(self, parts: Sequence[Part]) -> list[Part]:
        """Parts with numbers of the whole batch, where the terms of the loss count different things."""
        graph = self.graph_of(parts[0])
        if graph.whole is None:
            return list(parts)
        numbers = numbers_of(graph, [part.tensors for part in parts], self.initial.buffers)
        each = zip(parts, numbers, strict=True)
        return [replace(part, weight=1.0, numbers=known, adds_up=True) for part, known in each]

    # -- A and B ---------------------------------------------------------------------------------------------

    @cached_property
    def losses(self) -> LossModule:
        """The user's module with its loss."""
        return LossModule(self.initial.module, self.recipe)

    def plainly(self, parts: Sequence[Part], *, draws: Draws = SameDraws) -> Outcome:
        """Compute the outcome of the user's module."""
        return plainly(self.losses, parts, draws=draws)

    def in_turn(self, parts: Sequence[Part], *, draws: Draws = SameDraws, at_once: bool = False) -> Outcome:
        """Compute the outcome of the sections."""
        return in_turn(self.model, self.initial, parts, draws=draws, at_once=at_once)

    def losses_in_turn(self, parts: Sequence[Part], *, draws: Draws) -> tuple[float, ...]:
        """Compute the losses of the sections alone, each from the same buffers."""
        return self.in_turn([replace(part, weight=0.0) for part in parts], draws=draws, at_once=True).losses

    # -- what is compared ------------------------------------------------------------------------------------

    @property
    def tolerance(self) -> Tolerance:
        """Differences that the dtypes of the model explain."""
        return TOLERANCES[coarsest(self.recipe.dtype, *self.model.dtypes.values())]

    def differences(self, found: Outcome, expected: Outcome, noise: Noise | None = None) -> list[Difference]:
        """Values that differ by more than rounding."""
        return differences(found, expected, self.tolerance, noise)

    def described(self, odd: Sequence[Difference], parts: Sequence[Part]) -> str:
        """Describe the largest difference, for people."""
        indices = [index for part in parts for index in part.indices]
        others = f" (and {len(odd) - 1} other differences)" if len(odd) > 1 else ""
        return f"for dataset indices {indices}, {self._one(odd[0])}{others}"

    def _one(self, each: Difference) -> str:
        if each.what == "loss":
            return f"the captured model's loss is {each.found:.7g}, plain PyTorch's {each.expected:.7g}"
        if each.what == "metric":
            return f"{each.name} of metrics= is {each.found:.7g} as captured, {each.expected:.7g} in plain PyTorch"
        sections = [f", section {section.index}" for section in self.model.sections if each.name in section.parameters]
        place = f"{each.name} (in {_owner(self.initial.module, each.name)}{''.join(sections[:1])})"
        if each.missing:
            return f"{place} gets no gradient in the captured model, but one of {each.expected:.3g} in plain PyTorch"
        if each.what == "buffer":
            return f"the buffer {place} differs by {each.error:.1%} after the step from plain PyTorch's"
        return (
            f"the gradient of {place} differs from plain PyTorch's by {each.error:.1%} of the model's largest gradient"
        )


def _owner(module: nn.Module, parameter: str) -> str:
    """The class of the module that a parameter belongs to."""
    owner = parameter.rpartition(".")[0]
    try:
        return type(module.get_submodule(owner)).__name__
    except AttributeError:
        return type(module).__name__
