"""Runs one section: forward without or with a graph.

Values are detached at every section boundary, also within a stage, so that a section computes the same bits
wherever the stage boundaries lie.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from varuna.data.randomness import derive_key, generator_lock
from varuna.engine.graphs.direct_calls import direct
from varuna.engine.graphs.gradient_kernels import without_graph
from varuna.engine.graphs.run_once import Run, Seeded
from varuna.engine.graphs.user_place import note_place
from varuna.engine.stage.frozen_stream import FrozenStream, Pass
from varuna.engine.stage.tape import Tape, crossing
from varuna.partition.cut.split import Crossing, SectionGraph
from varuna.partition.cut.split_backward import PendingWeights
from varuna.partition.model import PartitionedModel

_QUIET = nullcontext()
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Tensors:
    """Tensors that a section is given besides its arguments: leaves, buffers, constants, in the graph's order."""

    leaves: tuple[Tensor, ...]
    """parameters; a tied one is an alias with a gradient of its own"""
    fixed: tuple[Tensor, ...]
    """buffers, then constants"""
    stream: FrozenStream | None = None
    """of those leaves that are not on the device all the time"""


class Examples(NamedTuple):
    """A micro-batch as a section sees it."""

    inputs: Mapping[str, Tensor]
    size: int
    """rows of its tensors"""
    variant: int = 0
    """number of the model's graph that it is for: there is one for each declared length"""
    sizes: tuple[int, ...] = ()
    """its open sizes, if the model has such"""
    there: int | None = None
    """samples that it counts for, if they are not its rows"""

    @property
    def samples(self) -> int:
        """Samples that it counts for."""
        return self.size if self.there is None else self.there


Halved = Callable[[SectionGraph, list[Any], Seeded], Run | None]
"""(section, arguments, seeded) -> its graph for a B in two halves; see ``engine.graphs.split_backward_check``"""
Compiled = Callable[[SectionGraph, list[Any], Seeded], Run]
"""(section, arguments, seeded) -> what runs in its graph's place; see ``engine.graphs.compiled``"""


NoteStatistics = Callable[[int, int, Sequence[Tensor]], None]
"""Called with section, micro-batch and what updates of buffers are computed from."""
NoteTruths = Callable[[SectionGraph, int, Sequence[Tensor]], None]
"""Called with section, micro-batch and whether its branches went as they were captured."""


class SectionRunner:
    """Runs one section on this rank's tensors."""

    def __init__(
        self,
        section: SectionGraph,
        tensors: Tensors,
        crossings: Mapping[str, Crossing],
        seed: int,
        halved: Halved | None = None,
        note: NoteStatistics | None = None,
        compiled: Compiled | None = None,
        guard: NoteTruths | None = None,
    ) -> None:
        self.section = section
        self._note, self._guard = note, guard
        self._tensors = tensors
        self._stream = tensors.stream if tensors.stream is not None and section.index in tensors.stream else None
        self._halved = halved if compiled is None else None  # a compiled section's backward is one whole
        self.is_compiled = compiled is not None
        self._grad_taken = tuple(crossings[name].differentiable for name in section.takes)
        self._seed = seed
        self._compiled = compiled
        self._plain: GraphModule | None = None
        self._graph: Run | None = None
        # by examples and open sizes: all else that decides on kernels is fixed here
        self._runs: dict[tuple[int, tuple[int, ...]], Run] = {}  # compiled
        self._halves: dict[int, Run | None] = {}

    def forward(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int
    ) -> tuple[Tensor, ...]:
        """Run without a graph; returns what the section makes.

        Args:
            values: what crosses into the section, by name; the first dimension counts examples.
            examples: the micro-batch.
            step: keys the randomness, with ``micro_batch``.
            micro_batch: its global number.
        """
        seeded = partial(self._seeded, step, micro_batch)
        with torch.no_grad():
            # The same kind of arguments in F and in R, so the same graph and kernels (see ``_taken``).
            arguments = self._arguments(self._taken(values), examples, "F")
            run = self._run(arguments, examples, seeded) if self._compiled else self._without_graph(arguments)
            with seeded():
                made = self._noted(self._called(run, arguments), micro_batch)
            return crossing(made)

    def record(
        self,
        values: Mapping[str, Tensor],
        examples: Examples,
        step: int,
        micro_batch: int,
        *,
        split: bool = False,
        joined: Mapping[str, Tensor] = _NOTHING,
    ) -> Tape:
        """Run with a graph, for a backward to follow.

        Args:
            values: what crosses into the section, by name; the first dimension counts examples.
            examples: the micro-batch.
            step: keys the randomness, with ``micro_batch``.
            micro_batch: its global number.
            split: the backward is to run in two halves, where the section can.
            joined: those that it takes with their graph.
        """
        taken = self._taken({**values, **joined}, joined) if joined else self._taken(values)
        arguments = self._arguments(taken, examples, "R")
        seeded = partial(self._seeded, step, micro_batch)
        run, pending = self._run(arguments, examples, seeded), None
        if split and self._halved is not None and not examples.sizes:  # a proof for each size would cost too much
            if examples.size not in self._halves:
                self._halves[examples.size] = self._halved(self.section, arguments, seeded)
            if (halved := self._halves[examples.size]) is not None:
                pending = PendingWeights()
                run, arguments = halved, [pending, *arguments]
        saving = _QUIET if self._stream is None else self._stream.saving(self.section.index)
        with _QUIET if torch.is_grad_enabled() else torch.enable_grad(), saving, seeded():
            made = self._noted(self._called(run, arguments), micro_batch)
        # B reads the gradients of what was taken from these; joined values get theirs within autograd.
        leaves = dict(zip(self.section.takes, taken, strict=True))
        if joined:
            leaves = {name: leaf for name, leaf in leaves.items() if name not in joined}
        return Tape(self.section, leaves, list(made), pending, micro_batch)

    def _called(self, run: Run, arguments: list[Any]) -> tuple[Tensor, ...]:
        try:
            return run(*arguments)
        except Exception as error:
            note_place(error, self.section, getattr(run, "__self__", None))
            raise

    def _without_graph(self, arguments: list[Any]) -> Run:
        """Return the section's graph for F."""
        if self._plain is None:
            self._plain = direct(without_graph(self.section.module, arguments))
        run: Run = self._plain.forward
        return run

    def _run(self, arguments: list[Any], examples: Examples, seeded: Seeded) -> Run:
        """Return the section's graph, or what it was compiled to."""
        if self._compiled is None:
            if self._graph is None:
                self._graph = direct(self.section.module).forward
            return self._graph
        key = examples.size, examples.sizes
        if key not in self._runs:
            self._runs[key] = self._compiled(self.section, arguments, seeded)
        return self._runs[key]

    def _taken(self, values: Mapping[str, Tensor], joined: Collection[str] = ()) -> list[Tensor]:
        """Return the values that the section takes, as its own leaves but for the joined; F and R get the same kind."""
        return [
            values[name].detach().requires_grad_() if grad and name not in joined else values[name]
            for name, grad in zip(self.section.takes, self._grad_taken, strict=True)
        ]

    def _noted(self, results: tuple[Tensor, ...], micro_batch: int) -> tuple[Tensor, ...]:
        """Return what the section computes; the statistics and conditions that follow it are noted."""
        section, count = self.section, len(self.section.makes)
        end = count + len(section.statistics)
        if section.updates and self._note is not None:
            self._note(section.index, micro_batch, results[count:end])
        if section.truths and self._guard is not None:
            self._guard(section, micro_batch, results[end:])
        return results[:count]

    def _arguments(self, taken: list[Tensor], examples: Examples, way: Pass) -> list[Any]:
        section = self.section
        # Kernels may be chosen by strides, which must not depend on how samples were stacked.
        inputs = [examples.inputs[key].contiguous() for key in section.inputs]
        size = [examples.size] if section.needs_batch_size else []
        leaves: Iterable[Tensor] = self._tensors.leaves
        if self._stream is not None:
            here = self._stream.at_work(section.index, way)
            leaves = (here.get(name, leaf) for name, leaf in zip(section.parameters, leaves, strict=True))
        return [*taken, *inputs, *size, *leaves, *self._tensors.fixed]

    def _seeded(self, step: int, micro_batch: int) -> AbstractContextManager[object]:
        """Seed the randomness by (seed, step, global micro-batch, section): the same in F, R and any plan."""
        return _Seeded(derive_key(self._seed, step, micro_batch, self.section.index)) if self.section.random else _QUIET


class _Seeded(AbstractContextManager[object]):
    """Holds the process-wide generator while a section draws from it."""

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> object:
        # Several ranks may be threads of one process, which has one generator.
        generator_lock.acquire()
        torch.default_generator.manual_seed(self._key)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # this process computes on a GPU, its current one
            torch.cuda.manual_seed(self._key)
        return None

    def __exit__(self, *_: object) -> None:
        generator_lock.release()


def flow_on(
    model: PartitionedModel, flowing: Mapping[str, Tensor], runner: SectionRunner, made: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the values that cross the cut after a section; the rest is freed."""
    next_section = runner.section.index + 1
    if next_section == len(model.sections):
        return {}
    known = {**flowing, **dict(zip(runner.section.makes, made, strict=True))}
    return {crossing.name: known[crossing.name] for crossing in model.split.crossings[next_section]}
