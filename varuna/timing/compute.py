"""Measures F, R, B and the optimizer step on this worker's device, over a sweep of micro-batch sizes."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from varuna.calibration.samples import SectionSamples, Sized
from varuna.calibration.statistics import best_size
from varuna.calibration.windows import window_bytes
from varuna.core.errors import NoPlanError
from varuna.core.units import format_bytes
from varuna.engine.stage.job import Job
from varuna.partition.initial.initial_values import InitialParameters
from varuna.partition.lengths import at_longest
from varuna.timing.window import Pass, Window

_Made = TypeVar("_Made")
_LEAST_ROUNDS, _LEAST_ROUNDS_OF_WORSE = 5, 3
_MOST_ROUNDS = 30


class Thoroughness(NamedTuple):
    """Limits on the time and the extent of measuring."""

    budget_s: float
    """for the rounds of one size, beyond the fewest rounds"""
    least_rounds: int = _LEAST_ROUNDS
    undisturbed: bool = False
    """only the fastest round counts, without what other programs take: for few rounds on a busy machine"""
    halves: bool = True
    """also time I and W, the halves of B"""
    updates: bool = True
    """also time the user's optimizer, and copies of the state"""
    deadline_s: float = math.inf
    """``time.monotonic()`` by which sizes are over: one that would take longer is not begun"""


class Computed(NamedTuple):
    """Measurements of one window."""

    sections: tuple[SectionSamples, ...]
    updates: tuple[Sized, ...]
    snapshots: tuple[Sized, ...]
    arrivals: tuple[Sized, ...]
    is_cut_short: bool
    """the deadline ended the sweep, neither the memory nor that larger sizes were no better"""


def measure_window(
    job: Job,
    span: range,
    sizes: Sequence[int],
    *,
    beginning: InitialParameters,
    batch: Callable[[int], dict[str, Tensor]],
    memory_bytes: int | None,
    agree: Callable[[float], float] = lambda value: value,
    effort: Thoroughness,
) -> Computed:
    """Sweep m over whole passes through the sections ``span``.

    Args:
        job: the captured job.
        span: its sections that are measured together.
        sizes: of micro-batches, ascending.
        beginning: gives parameters.
        batch: collates that many samples.
        memory_bytes: sizes that need more are not tried.
        agree: the largest of all workers' values, so that all go through the same rounds at the same time.
        effort: how long to measure.

    Raises:
        NoPlanError: memory does not hold the first size.
    """
    need = window_bytes(job.model.facts, span, sizes[0])
    if memory_bytes is not None and need > memory_bytes:
        raise NoPlanError(
            f"measuring section {span.start} takes {format_bytes(need)}, but this worker has "
            f"{format_bytes(memory_bytes)}. Pass a larger cut= to Trainer, so that sections are smaller, or use "
            "devices with more memory."
        )
    window = Window(job, span.start, span.stop, beginning, undisturbed=effort.undisturbed)
    samples: list[SectionSamples] = []
    per_example_s = 0.0  # that measuring the size before took
    best_s = math.inf  # per example, of the sizes before
    is_cut_short = False

    def seconds(size: int) -> float | None:
        nonlocal per_example_s, best_s, is_cut_short
        if memory_bytes is not None and window_bytes(job.model.facts, span, size) > memory_bytes:
            return None
        begin_s = time.monotonic()
        is_cut_short = bool(agree(float(bool(samples) and begin_s + per_example_s * size > effort.deadline_s)))
        if is_cut_short:
            return None
        passes = timed_rounds(window, at_longest(job.model, batch(size)), size, agree, effort, best_s * size)
        if passes is None:
            return None
        per_example_s = (time.monotonic() - begin_s) / size
        samples.extend(_samples([min(passes, key=_length)] if effort.undisturbed else passes, span, size))
        taken_s = agree((min if effort.undisturbed else median)(_length(each) for each in passes))
        best_s = min(best_s, taken_s / size)
        return taken_s

    best_size(sizes, seconds)
    once = _of_steps(window, span, beginning) if effort.updates else ((), (), ())
    return Computed(tuple(samples), *once, is_cut_short)


def timed_rounds(
    window: Window,
    batch: dict[str, Tensor],
    size: int,
    agree: Callable[[float], float],
    effort: Thoroughness,
    promising_s: float = math.inf,
) -> list[Pass] | None:
    """Rounds at one size; one before them, which fills allocators, does not count.

    None if some worker ran out of memory. Every worker asks ``agree`` equally often, whichever of them runs out.

    Args:
        window: what runs.
        batch: its samples.
        size: how many.
        agree: the largest of all workers' values.
        effort: how long to measure.
        promising_s: a size whose first round takes longer will not be the best one, so fewer rounds will do.
    """

    def everywhere(work: Callable[[], _Made]) -> _Made | None:
        try:
            made = work()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            made = None
        return None if agree(float(made is None)) else made

    def one() -> Pass:
        return window.round(batch, size, halves=effort.halves)

    def first() -> Pass:
        one()
        return one()

    begun = everywhere(first)
    if begun is None:
        return None
    taken_s = max(agree(_length(begun)), 1e-6)
    least = effort.least_rounds if taken_s < promising_s else min(_LEAST_ROUNDS_OF_WORSE, effort.least_rounds)
    count = max(least, min(_MOST_ROUNDS, int(effort.budget_s / taken_s)))
    rest = everywhere(lambda: [one() for _ in range(count - 1)])
    return None if rest is None else [begun, *rest]


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a device, or the host, whose error has no class of its own, is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _length(each: Pass) -> float:
    return sum(sum(times.values()) for times in each)


def _samples(passes: Sequence[Pass], span: range, size: int) -> list[SectionSamples]:
    return [
        SectionSamples(
            section=section,
            micro_batch=size,
            forward_s=tuple(each.forward_s[section] for each in passes),
            recompute_s=tuple(each.recompute_s[section] for each in passes),
            backward_s=tuple(each.backward_s[section] for each in passes),
            input_s=tuple(each.input_s[section] for each in passes if section in each.input_s),
            weight_s=tuple(each.weight_s[section] for each in passes if section in each.weight_s),
        )
        for section in span
    ]


def _of_steps(
    window: Window, span: range, beginning: InitialParameters
) -> tuple[tuple[Sized, ...], tuple[Sized, ...], tuple[Sized, ...]]:
    """The optimizer step and copies of the window and of its smallest part, to tell fixed costs from those per byte."""
    updates, snapshots, arrivals = list[Sized](), list[Sized](), list[Sized]()
    facts = window.job.model.facts.sections
    smallest = min(span, key=lambda section: facts[section].trainable_bytes)
    parts = {range(smallest, smallest + 1): None, span: window}
    for sections, known in parts.items():
        part = known or Window(window.job, sections.start, sections.stop, beginning)
        state = sum(facts[i].parameter_bytes + facts[i].optimizer_bytes for i in sections)
        gradients = sum(facts[i].trainable_bytes for i in sections)
        part.update()  # builds the optimizer's state
        updates += [Sized(state + gradients, part.update()) for _ in range(_LEAST_ROUNDS)]
        snapshots += [Sized(state, part.snapshot()) for _ in range(_LEAST_ROUNDS)]
        arrivals += part.arrivals(_LEAST_ROUNDS)
    return tuple(updates), tuple(snapshots), tuple(arrivals)
