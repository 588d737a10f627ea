"""One section at work: forward without or with a graph, and backward.

Values are detached at every section boundary, also within a stage, so that a section computes the same bits
wherever the stage boundaries lie (DESIGN §5.2, ``reference/engine-notes.md`` §1).
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.data.randomness import derive_key, generator_lock
from varuna.partition.split import Crossing, SectionGraph


@dataclass(frozen=True)
class Tensors:
    """What a section is given besides its arguments: leaves, buffers, constants, in the graph's order."""

    leaves: tuple[Tensor, ...]
    """parameters; a tied one is an alias with a gradient of its own"""
    fixed: tuple[Tensor, ...]
    """buffers, then constants"""


@dataclass(frozen=True)
class Examples:
    """One micro-batch as a section sees it."""

    inputs: Mapping[str, Tensor]
    size: int


@dataclass(frozen=True)
class Tape:
    """What B needs of one section's forward."""

    section: SectionGraph
    taken: dict[str, Tensor]
    made: tuple[Tensor, ...]


class SectionRunner:
    """Runs one section on this rank's tensors."""

    def __init__(self, section: SectionGraph, tensors: Tensors, crossings: Mapping[str, Crossing], seed: int) -> None:
        self.section = section
        self._tensors = tensors
        self._grad_taken = tuple(crossings[name].differentiable for name in section.takes)
        self._seed = seed
        self._run = section.module.forward

    def forward(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int
    ) -> tuple[Tensor, ...]:
        """Run without a graph; returns what the section makes."""
        with torch.no_grad(), self._seeded(step, micro_batch):
            taken = [values[name] for name in self.section.takes]
            return tuple(made.contiguous() for made in self._call(taken, examples))

    def record(self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int) -> Tape:
        """Run with a graph, for a backward to follow."""
        taken = [
            values[name].detach().requires_grad_() if grad else values[name]
            for name, grad in zip(self.section.takes, self._grad_taken, strict=True)
        ]
        with torch.enable_grad(), self._seeded(step, micro_batch):
            made = self._call(taken, examples)
        return Tape(self.section, dict(zip(self.section.takes, taken, strict=True)), made)

    def _call(self, taken: list[Tensor], examples: Examples) -> tuple[Tensor, ...]:
        section = self.section
        inputs = [examples.inputs[key] for key in section.inputs]
        size = [examples.size] if section.needs_batch_size else []
        result: tuple[Tensor, ...] = self._run(*taken, *inputs, *size, *self._tensors.leaves, *self._tensors.fixed)
        return result

    def _seeded(self, step: int, micro_batch: int):  # type: ignore[no-untyped-def]
        """Randomness keyed by (seed, step, global micro-batch, section): the same in F, R and any plan."""
        return _Seeded(derive_key(self._seed, step, micro_batch, self.section.index)) if self.section.random else _QUIET


_QUIET = nullcontext()


class _Seeded:
    """Holds the process-wide generator while a section draws from it."""

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> None:
        generator_lock.acquire()
        torch.default_generator.manual_seed(self._key)
        if torch.cuda.is_available():
            torch.cuda.manual_seed(self._key)

    def __exit__(self, *_: object) -> None:
        generator_lock.release()


def backward(tape: Tape, gradients: dict[str, Tensor]) -> None:
    """Backward of one section, in place of ``gradients``: those of what it made go, those of what it took come.

    ``gradients`` sums the contributions of later sections first, so the order of additions does not depend
    on where stages begin. Gradients of parameters accumulate in the leaves.
    """
    pairs = [
        (made, gradient)
        for name, made in zip(tape.section.makes, tape.made, strict=True)
        if (gradient := gradients.pop(name, None)) is not None and made.requires_grad
    ]
    if pairs:
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
    for name, taken in tape.taken.items():
        if taken.grad is not None:
            known = gradients.get(name)
            gradients[name] = taken.grad.contiguous() if known is None else known + taken.grad
            taken.grad = None
