"""Consecutive sections of the model as one stage of this worker, timed in place.

A section measured alone is up to a quarter too fast: its weights stay in the caches. So whole passes run through
the engine's own stage, all sections one after another and into its flat gradient sums, and a section's time is what
passes between two marks within the pass.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from varuna.calibration.samples import Sized
from varuna.core.plan import Pipeline, Plan
from varuna.engine.device.host_copies import HOST
from varuna.engine.device.streams import Event, Streams
from varuna.engine.stage.job import Job
from varuna.engine.stage.section import Examples, SectionRunner
from varuna.engine.stage.stage import DeferredWeightGrad, Stage
from varuna.engine.stage.tape import Tape
from varuna.engine.worker.stored import initial_states
from varuna.partition.batch_weight import completed
from varuna.partition.cut.split import Crossing
from varuna.partition.initial.initial_values import InitialParameters


class ActionClock(Protocol):
    """Marks, and the seconds between them."""

    def mark(self) -> Any:
        """A mark after everything that this thread has launched so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one mark to another; waits until the device has passed both."""


class HostClock:
    """Clock of a CPU, where a call returns when it is computed."""

    def mark(self) -> float:
        """The time now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """From one mark to another."""
        return end - begin


class ThreadClock(HostClock):
    """Clock of a CPU that stands still while this thread does not run; for computation by this thread alone."""

    def mark(self) -> float:
        """Processor time of this thread so far."""
        return time.thread_time()


class DeviceClock:
    """Clock of a GPU, by events of its streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def mark(self) -> Event:
        """An event after everything that is queued."""
        return self._streams.record_event(self._streams.computing(), timed=True)

    def seconds(self, begin: Event, end: Event) -> float:
        """From one mark to another."""
        end.wait()
        return end.seconds_since(begin)


def clock_over(streams: Streams | None, *, undisturbed: bool = False) -> ActionClock:
    """The clock of a device with these streams; of a CPU without.

    Args:
        streams: of the device.
        undisturbed: leave out, where that is known, what other programs of the machine take.
    """
    if streams is not None:
        return DeviceClock(streams)
    return ThreadClock() if undisturbed and torch.get_num_threads() == 1 else HostClock()


Times = dict[int, float]
"""By section: seconds."""


class Pass(NamedTuple):
    """One round: seconds that each section took."""

    forward_s: Times
    recompute_s: Times
    backward_s: Times
    input_s: Times
    """of sections whose B can be split"""
    weight_s: Times


class Window:
    """Sections ``first`` to ``stop`` - 1 of the model, as one stage."""

    def __init__(
        self, job: Job, first: int, stop: int, beginning: InitialParameters, *, undisturbed: bool = False
    ) -> None:
        """Build the stage.

        Args:
            job: the captured job.
            first: its lowest section.
            stop: one past its highest section.
            beginning: gives parameters.
            undisturbed: leave out what other programs take.
        """
        count = len(job.model.sections)
        starts = tuple(sorted({0, first, stop} - {count}))
        plan = Plan(
            micro_batch=1,
            global_batch=1,
            pipelines=(Pipeline(bounds=(*starts, count), stash_limits=(1,) * len(starts)),),
        )
        states = initial_states(job.model, range(first, stop), beginning.parameters, job.buffers)
        self.job = job
        self.first, self.stop = first, stop
        self._clock = clock_over(job.traffic.streams, undisturbed=undisturbed)
        self._marks: list[tuple[int, Any]] = []
        self.stage = Stage(job, plan, starts.index(first), states, 0)
        timed = [_Timed(runner, self._mark) for runner in self.stage.variants[0]]
        self.stage.variants[0] = cast(list[SectionRunner], timed)

    def round(self, batch: Mapping[str, Tensor], examples: int, *, halves: bool = True) -> Pass:
        """F, then R and B, then (for ``halves``) R, I and W, of one micro-batch, as a stage within a run does them."""
        split, device = self.job.model.split, self.job.device
        inputs = Examples(
            self.job.traffic.links.copy_to_device(completed(self.job.model, batch, self.job.buffers)), examples
        )
        out = () if self.stage.is_last else split.crossings[self.stop]
        leaving = [crossing for crossing in out if crossing.differentiable]
        values = _made_up(split.crossings[self.first], examples, device)
        forward = self._timed(lambda: self.stage.forward(values, inputs, 0, 0))
        tapes, recompute = self._recomputed(values, inputs, split=False)
        gradients = _made_up(leaving, examples, device) if out else self._loss_gradient()
        backward = self._timed(lambda: self.stage.backward(tapes, gradients, self._mark))
        if not halves:
            return Pass(forward, recompute, backward, {}, {})
        tapes, _ = self._recomputed(values, inputs, split=True)
        splits = {tape.section.index for tape in tapes if tape.pending is not None}
        left: list[DeferredWeightGrad] = []
        gradients = _made_up(leaving, examples, device) if out else self._loss_gradient()
        input_s = self._timed(lambda: self._input_backward(tapes, gradients, left))
        weight_s = self._timed(lambda: self.stage.weight_backward(left, self._mark))
        return Pass(
            forward,
            recompute,
            backward,
            {section: seconds for section, seconds in input_s.items() if section in splits},
            {section: seconds for section, seconds in weight_s.items() if section in splits},
        )

    def _recomputed(self, values: Mapping[str, Tensor], examples: Examples, *, split: bool) -> tuple[list[Tape], Times]:
        tapes: list[Tape] = []
        times = self._timed(lambda: tapes.extend(self.stage.record(values, examples, 0, 0, split=split)))
        return tapes, times

    def _input_backward(self, tapes: list[Tape], gradients: dict[str, Tensor], left: list[DeferredWeightGrad]) -> None:
        """I section by section, each with its mark."""
        while tapes:
            gradients, mine = self.stage.input_backward([tapes.pop()], gradients)
            left += mine
            self._mark(mine[0][0])

    def update(self) -> float:
        """Seconds of what a step does besides F, R and B: sums at zero, norms, scaling, the optimizer.

        As in training, the sums are not zero by then: from zeros AdamW makes numbers that take twice as long.
        """
        begin = self._clock.mark()
        self.stage.clear_gradients()
        cleared = self._clock.mark()
        for bucket in self.stage.buckets.values():
            bucket.flat.normal_()
        resumed = self._clock.mark()
        self.stage.squared_norms()
        self.stage.apply(self.stage.next_step, 0.5)
        applied = self._clock.mark()
        return self._clock.seconds(begin, cleared) + self._clock.seconds(resumed, applied)

    def snapshot(self) -> float:
        """Seconds to copy the stage's state into host memory at a step boundary."""
        copies = self.job.traffic.saves
        begin_s = time.perf_counter()
        for section in self.stage.sections:
            for tensor in self.stage.state_of(section).tensors.values():
                copies.copy_to_host([(tensor.detach(), copies.room_for(tensor))]).wait()
        return time.perf_counter() - begin_s

    def arrivals(self, rounds: int) -> list[Sized]:
        """Bytes of the stage's parameters, and seconds to copy them from host memory to a GPU; none for a CPU.

        What a CPU computes with is in host memory, or comes from a disk, which has no one rate.
        """
        if self.job.traffic.streams is None:
            return []
        copies = self.job.traffic.frozen
        values = [value.detach() for value in self.stage.parameters.values()]
        pairs = list(zip(values, copies.at_rest([value.to(HOST) for value in values]), strict=True))

        def copied_s() -> float:
            copies.point().wait()
            begin_s = time.perf_counter()
            copies.overwrite(pairs).wait()
            return time.perf_counter() - begin_s

        return [Sized(sum(value.nbytes for value in values), copied_s()) for _ in range(rounds)]

    def _loss_gradient(self) -> dict[str, Tensor]:
        loss = self.job.model.sections[-1].makes[0]
        return {loss: torch.tensor(1.0, dtype=self.job.dtype, device=self.job.device)}

    def _mark(self, section: int) -> None:
        self._marks.append((section, self._clock.mark()))

    def _timed(self, work: Callable[[], object]) -> Times:
        self._marks.clear()
        last = self._clock.mark()
        work()
        times: Times = {}
        for section, mark in self._marks:
            times[section] = self._clock.seconds(last, mark)
            last = mark
        return times


class _Timed:
    """A section's runner that sets a mark at each of its ends."""

    def __init__(self, runner: SectionRunner, mark: Callable[[int], None]) -> None:
        self.section = runner.section
        self._runner, self._mark = runner, mark

    def forward(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int
    ) -> tuple[Tensor, ...]:
        made = self._runner.forward(values, examples, step, micro_batch)
        self._mark(self.section.index)
        return made

    def record(
        self,
        values: Mapping[str, Tensor],
        examples: Examples,
        step: int,
        micro_batch: int,
        *,
        split: bool,
    ) -> Tape:
        tape = self._runner.record(values, examples, step, micro_batch, split=split)
        self._mark(self.section.index)
        return tape


def _made_up(crossings: Iterable[Crossing], examples: int, device: torch.device) -> dict[str, Tensor]:
    """Values that could have crossed; integers are 0, which indexes anything."""
    made = {}
    for crossing in crossings:
        shape, dtype = crossing.shape(examples), crossing.dtype
        is_number = dtype.is_floating_point or dtype.is_complex
        random = torch.randn(shape, device=device).to(dtype) if is_number else None
        made[crossing.name] = torch.zeros(shape, dtype=dtype, device=device) if random is None else random
    return made
