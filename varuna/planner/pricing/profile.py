"""A calibration at one micro-batch size: figures by section, and their sums over any span of sections."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub

from varuna.calibration.format import Calibration, SectionKind
from varuna.schedule.buffers import FROZEN_PLACES


@dataclass(frozen=True, slots=True)
class SpanSums:
    """A figure by section, with its prefix sums."""

    values: tuple[float, ...]
    before: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> "SpanSums":
        """Sums of ``values``, one for each section."""
        return SpanSums(tuple(values), tuple(accumulate(values, initial=0)))

    def over(self, span: range) -> float:
        """The sum over consecutive sections."""
        return self.before[span.stop] - self.before[span.start]


@dataclass(frozen=True, slots=True)
class Peaks:
    """A figure by section, with its maxima over runs of 1, 2, 4, ... sections from each."""

    levels: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(values: Sequence[float]) -> "Peaks":
        """Compute the maxima of all runs of 1, 2, 4, ... sections."""
        levels = [tuple(values)]
        while 2 ** len(levels) <= len(values):
            half = 2 ** (len(levels) - 1)
            levels.append(tuple(map(max, levels[-1], levels[-1][half:])))
        return Peaks(tuple(levels))

    def over(self, start: int, stop: int) -> float:
        """The largest of sections [start, stop), of which there is one at least."""
        level = (stop - start).bit_length() - 1
        row = self.levels[level]
        return max(row[start], row[stop - (1 << level)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds and bytes of each section for a micro-batch of m examples."""

    calibration: Calibration
    micro_batch: int
    forward_s: SpanSums
    recompute_s: SpanSums
    record_s: SpanSums
    """F that keeps its activations."""
    backward_s: SpanSums
    input_s: SpanSums
    """I; where a section cannot be split, the whole B."""
    weight_s: SpanSums
    """W; 0 where a section cannot be split."""
    activation_bytes: SpanSums
    forward_bytes: tuple[float, ...]
    """Needed while F of a section runs, besides what it takes."""
    inner_forward_bytes: Peaks
    """The same with what the section before has made."""
    recording_bytes: Peaks
    """Needed while R of a section runs, with the activations of all sections from the first up to it."""
    working_bytes: Peaks
    """Needed while R or B of a section runs, with the activations of all sections from the first up to it."""
    splitting_bytes: Peaks
    """Like ``working_bytes``, for I: less what sections up to it leave for W, as later ones have left theirs."""
    weighing_bytes: Peaks
    """Needed while W of a section runs, with what all sections from the first up to it have left."""
    input_bytes: SpanSums
    """Samples that a section is the first to read."""
    queued_bytes: SpanSums
    """Kept between I and W."""
    statistics_bytes: SpanSums
    """Of each micro-batch, for buffers: kept until the step is applied."""
    parameter_bytes: SpanSums
    streamed_bytes: SpanSums
    """Parameters that rest in host memory, if any do."""
    most_streamed_bytes: Peaks
    gradient_bytes: SpanSums
    most_gradient_bytes: Peaks
    reduced_bytes: SpanSums
    """Bytes of gradients as an all-reduce sums them."""
    optimizer_bytes: SpanSums
    """Optimizer state on the GPU: none where it lives in host memory."""
    state_bytes: SpanSums
    """Parameters and optimizer state, wherever they live: what a checkpoint holds."""
    work_s: SpanSums
    """Seconds of F and B together."""
    resident_bytes: SpanSums
    """Parameters, gradients and optimizer state on the GPU, but for what is streamed."""
    own_bytes: SpanSums
    """The same without gradients and frozen parameters: what a tentative step copies on the GPU."""
    update_bytes: SpanSums
    """Needed while the optimizer updates the section's parameters, beside what is streamed of offloaded state."""
    most_update_bytes: Peaks
    host_bytes: SpanSums
    """Optimizer state in host memory."""
    host_copy_bytes: SpanSums
    """Bytes that a tentative step copies in host memory."""
    trainable_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    """Bytes of the activation after each section."""
    gradient_boundary_bytes: tuple[int, ...]
    """Bytes of the gradient that comes back to each section's end."""

    @property
    def sections(self) -> int:
        """Sections of the model."""
        return len(self.boundary_bytes)

    def streams(self, start: int, stop: int) -> bool:
        """Return whether places for streamed parameters of sections [start, stop) take less than all of them."""
        return self.streamed_bytes.before[-1] > 0 and self._places_bytes(start, stop) < self._streamed(start, stop)

    def streaming_bytes(self, start: int, stop: int) -> int:
        """Device memory for them."""
        return int(min(self._places_bytes(start, stop), self._streamed(start, stop)))

    def pass_s(self, start: int, stop: int) -> float:
        """Seconds in which all of them come to the device once, as for each F, R and B."""
        if not self.streams(start, stop):
            return 0.0
        return self._streamed(start, stop) / self.calibration.crossing_bytes_per_s

    def _streamed(self, start: int, stop: int) -> float:
        return self.streamed_bytes.before[stop] - self.streamed_bytes.before[start]

    def _places_bytes(self, start: int, stop: int) -> float:
        return FROZEN_PLACES * self.most_streamed_bytes.over(start, stop)


def profile(calibration: Calibration, micro_batch: int, *, streams_frozen: bool = False) -> Profile:
    """Evaluate each kind once and lay the figures out by section; frozen parameters may rest in host memory."""
    m, kinds, names = micro_batch, calibration.kinds, calibration.kind_names

    def lay(figure: Callable[[SectionKind], float]) -> list[float]:
        by_kind = {name: figure(kind) for name, kind in kinds.items()}
        return [by_kind[name] for name in names]

    def whole(figure: Callable[[SectionKind], int]) -> tuple[int, ...]:
        return tuple(int(value) for value in lay(figure))

    on_host = calibration.optimizer.host_bytes_per_s is not None

    def optimizer_bytes(kind: SectionKind) -> int:
        return 0 if on_host else kind.optimizer_bytes

    def streamed_bytes(kind: SectionKind) -> int:
        return kind.streamable_bytes if streams_frozen else 0

    def resident_bytes(kind: SectionKind) -> int:
        return kind.parameter_bytes - streamed_bytes(kind) + kind.summed_bytes + optimizer_bytes(kind)

    def own_bytes(kind: SectionKind) -> int:
        return 0 if on_host else kind.parameter_bytes - kind.streamable_bytes + kind.optimizer_bytes

    def update_bytes(kind: SectionKind) -> int:
        return 0 if on_host else kind.update_bytes

    def trained(kind: SectionKind, times: tuple[float, ...]) -> float:
        return 0.0 if kind.gradient_free else kind.at(times, m)

    def record_s(kind: SectionKind) -> float:
        return kind.at(kind.forward_s if kind.gradient_free else kind.recompute_s or kind.forward_s, m)

    boundary_bytes = whole(lambda kind: kind.boundary_bytes * m)
    back_bytes = whole(lambda kind: _gradient_boundary_bytes(kind) * m)
    activation_bytes = SpanSums.of(lay(lambda kind: kind.activation_bytes * m))
    forward_bytes = lay(lambda kind: kind.forward_bytes * m)
    backward_bytes = lay(lambda kind: kind.backward_bytes * m + kind.fixed_bytes)
    split_bytes = lay(lambda kind: _split_bytes(kind, m))
    fixed_bytes = lay(lambda kind: kind.fixed_bytes)
    queued_bytes = SpanSums.of(lay(lambda kind: _queued_bytes(kind) * m))
    alive, left = activation_bytes.before[1:], queued_bytes.before[1:]
    return Profile(
        calibration=calibration,
        micro_batch=m,
        forward_s=SpanSums.of(lay(lambda kind: kind.at(kind.forward_s, m))),
        recompute_s=SpanSums.of(lay(lambda kind: trained(kind, kind.recompute_s or kind.forward_s))),
        record_s=SpanSums.of(lay(record_s)),
        backward_s=SpanSums.of(lay(lambda kind: trained(kind, kind.backward_s))),
        input_s=SpanSums.of(lay(lambda kind: trained(kind, kind.input_s or kind.backward_s))),
        weight_s=SpanSums.of(lay(lambda kind: trained(kind, kind.weight_s) if kind.splits else 0.0)),
        activation_bytes=activation_bytes,
        forward_bytes=tuple(forward_bytes),
        inner_forward_bytes=Peaks.of(list(map(add, forward_bytes, (0, *boundary_bytes[:-1])))),
        recording_bytes=Peaks.of(list(map(add, alive, map(min, forward_bytes, backward_bytes)))),
        working_bytes=Peaks.of(list(map(add, alive, backward_bytes))),
        splitting_bytes=Peaks.of(list(map(sub, map(add, alive, split_bytes), left))),
        weighing_bytes=Peaks.of(list(map(add, left, fixed_bytes))),
        input_bytes=SpanSums.of(lay(lambda kind: kind.input_bytes * m)),
        queued_bytes=queued_bytes,
        statistics_bytes=SpanSums.of(lay(lambda kind: kind.statistics_bytes)),
        parameter_bytes=SpanSums.of(lay(lambda kind: kind.parameter_bytes)),
        streamed_bytes=SpanSums.of(lay(streamed_bytes)),
        most_streamed_bytes=Peaks.of(lay(streamed_bytes)),
        gradient_bytes=SpanSums.of(lay(lambda kind: kind.summed_bytes)),
        most_gradient_bytes=Peaks.of(lay(lambda kind: kind.summed_bytes)),
        reduced_bytes=SpanSums.of(lay(_reduced_bytes)),
        optimizer_bytes=SpanSums.of(lay(optimizer_bytes)),
        state_bytes=SpanSums.of(lay(lambda kind: kind.parameter_bytes + kind.optimizer_bytes)),
        work_s=SpanSums.of(lay(lambda kind: kind.at(kind.forward_s, m) + trained(kind, kind.backward_s))),
        resident_bytes=SpanSums.of(lay(resident_bytes)),
        own_bytes=SpanSums.of(lay(own_bytes)),
        update_bytes=SpanSums.of(lay(update_bytes)),
        most_update_bytes=Peaks.of(lay(update_bytes)),
        host_bytes=SpanSums.of(lay(lambda kind: kind.optimizer_bytes if on_host else 0)),
        host_copy_bytes=SpanSums.of(lay(lambda kind: kind.parameter_bytes + kind.optimizer_bytes if on_host else 0)),
        trainable_bytes=whole(lambda kind: kind.trainable_bytes),
        boundary_bytes=boundary_bytes,
        gradient_boundary_bytes=back_bytes,
    )


def _reduced_bytes(kind: SectionKind) -> int:
    return kind.summed_bytes if kind.reduced_bytes is None else kind.reduced_bytes


def _split_bytes(kind: SectionKind, micro_batch: int) -> int:
    if not kind.splits or kind.split_bytes is None:
        return kind.backward_bytes * micro_batch + kind.fixed_bytes
    return kind.split_bytes * micro_batch + kind.split_fixed_bytes


def _queued_bytes(kind: SectionKind) -> int:
    if not kind.splits:
        return 0
    return kind.activation_bytes if kind.queued_bytes is None else kind.queued_bytes


def _gradient_boundary_bytes(kind: SectionKind) -> int:
    return kind.boundary_bytes if kind.gradient_boundary_bytes is None else kind.gradient_boundary_bytes
