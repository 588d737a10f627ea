"""Depth and kept activations of a stage within its memory: in-flight depth first, then keeping.

Depth beats keeping on slow links, and each kept section costs its activations once
per micro-batch in flight. So later stages, which hold fewer in flight, keep more, and get more sections.

Where the stash may move to host memory, activations are kept first, and entries of the stash stay in what is left.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from varuna.planner.pricing.profile import Profile
from varuna.planner.pricing.spans import Spans
from varuna.schedule.buffers import STASH_IN_TRANSIT


class Size(NamedTuple):
    """The use that a stage makes of its memory."""

    depth: int
    """n_k, micro-batches in flight."""
    kept: int
    """Its last sections that keep their activations."""
    moved: int = 0
    """Inputs in flight that wait in host memory."""

    @property
    def on_device(self) -> int:
        """Number of inputs that are on the device at once."""
        return self.depth - self.moved + (STASH_IN_TRANSIT if self.moved else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The parts of a stage's memory at its peak, in bytes; the first six are its ``StateBytes``."""

    parameters: int
    gradients: int
    optimizer: int
    reserved: int
    statistics: int = 0
    staged: int = 0
    stash: int
    """Inputs of the n_k micro-batches in flight, their samples, and inputs that have arrived and wait.

    Of those in host memory, the few that are on their way.
    """
    kept: int
    """Activations of kept sections, of all micro-batches in flight, and what the first of them began with.

    Where all is kept and W's wait, what they wait with instead, if that is more.
    """
    live: int
    """Activations of the other sections, of one micro-batch, and what its section at work needs beside them.

    Like messages, at the moment at which both together are most.
    """
    messages: int
    """At each end messages that leave, and places for the next ones that come."""
    update: int
    """Bytes that the optimizer needs when nothing is in flight.

    Where a step may be applied before the vote, parameters and state as they were too, unless host memory has them.
    """
    host: int = 0
    """Offloaded optimizer state, its copy, frozen parameters, what is pinned, and inputs that wait there: in host
    memory, no part of ``total``.
    """

    @property
    def state(self) -> int:
        """Bytes in use throughout a step."""
        return self.parameters + self.gradients + self.optimizer + self.reserved + self.statistics + self.staged

    @property
    def total(self) -> int:
        """Bytes in use at the peak."""
        return self.state + max(self.stash + self.kept + self.live + self.messages, self.update)


class Sizer:
    """Memory of the stages of one depth P, at one micro-batch size."""

    def __init__(
        self,
        spans: Sequence[Spans],
        *,
        wanted: Sequence[int],
        least: Sequence[int],
        may_keep: bool,
        stash_moves: bool = False,
        tentative: bool = False,
    ) -> None:
        """Prepare for the probes of a balancing.

        Args:
            spans: by stage, what sections need on its device.
            wanted: in-flight depth of each stage where memory allows.
            least: depth below which a stage does not fit.
            may_keep: whether activations of some sections may be kept, and others not.
            stash_moves: inputs in flight may wait in host memory.
            tentative: steps may be applied before the vote, on copies; a lone stage applies none so.
        """
        self._spans = spans
        self._wanted = wanted
        self._least = least
        self._may_keep = may_keep
        self._last = len(wanted) - 1
        self._stash_moves = stash_moves
        self._copies = tentative and self._last > 0
        self._recomputes = [k < self._last and depth > 1 for k, depth in enumerate(wanted)]
        # What the stage before has sent and this one has not run yet waits here.
        self._waiting = (0, *(max(0, before - own) for before, own in pairwise(wanted)))
        roles = zip(wanted, self._waiting, least, self._recomputes, strict=True)
        shared = (may_keep, stash_moves, self._copies)
        self._known_s = [spans[k].known_s((*role, k == self._last, *shared)) for k, role in enumerate(roles)]

    def seconds(self, stage: int, start: int, stop: int) -> float:
        """Work for one micro-batch on a stage of sections [start, stop); infinite if they do not fit."""
        known_s = self._known_s[stage]
        try:
            return known_s[start, stop]
        except KeyError:
            seconds = known_s[start, stop] = self._seconds(stage, start, stop)
            return seconds

    def _seconds(self, stage: int, start: int, stop: int) -> float:
        first_kept, depth, moved = stop, 0, 0
        spans, profile = self._spans[stage], self._spans[stage].profile
        if spans.limit_bytes is not None or spans.host_limit_bytes is not None:
            depth, first_kept, moved = self._fit(stage, start, stop, self._wanted[stage])
            if not depth:
                return float("inf")
        work, forward, recompute = profile.work_s.before, profile.forward_s.before, profile.recompute_s.before
        whole_s, came_s = work[stop] - work[start], profile.pass_s(start, stop)
        if came_s:  # parameters come once more for each pass
            forward_s = forward[stop] - forward[start]
            whole_s = max(forward_s, came_s) + max(whole_s - forward_s, came_s)
        if not self._recomputes[stage]:
            return whole_s
        whole_s += max(recompute[first_kept] - recompute[start], came_s)
        if not moved:
            return whole_s
        return max(whole_s, crossing_time_s(profile, range(start, stop), moved=moved, depth=depth))

    def size(self, stage: int, start: int, stop: int, *, most: int | None = None) -> Size | None:
        """Depth, at most ``most``, and kept sections; None if not even the least depth fits."""
        wanted = self._wanted[stage]
        if most is not None and most < wanted:
            wanted = most
        depth, first_kept, moved = self._fit(stage, start, stop, wanted)
        return Size(depth, stop - first_kept, moved) if depth else None

    def sizes(self, starts: Sequence[int]) -> tuple[Size, ...]:
        """The sizes of stages that fit, which begin with these sections: none deeper than the next stage allows."""
        ends = (*starts[1:], self._spans[0].profile.sections)
        sizes: list[Size] = []
        most = None
        for k in reversed(range(len(starts))):
            size = self.size(k, starts[k], ends[k], most=most)
            assert size is not None, "the balance fits"
            sizes.append(size)
            most = size.depth + self._waiting[k]  # more than that would pile up here
        return tuple(reversed(sizes))

    def _fit(self, stage: int, start: int, stop: int, wanted: int) -> tuple[int, int, int]:
        """Depth, at most ``wanted``, first section that is kept, and inputs moved; depth 0 if it does not fit."""
        spans = self._spans[stage]
        free, incoming, each = spans.room(start, stop, self._copies)
        if free < 0:
            return 0, stop, 0
        if spans.limit_bytes is None:
            if not self._may_keep or stage == self._last:
                return wanted, stop, 0
            # Sections without activations count as kept: a stage without gradients then needs no R at all.
            activations = spans.profile.activation_bytes.before
            return wanted, bisect_left(activations, activations[stop], start, stop), 0
        depth, most_moved = wanted, 0
        free -= self._waiting[stage] * incoming
        peak = self._peak(stage, start, stop, wanted)
        places = wanted if free - peak >= wanted * each else self._places(stage, start, stop, free, each, peak)
        if each and self._stash_moves and places >= STASH_IN_TRANSIT:
            most_moved = self._most_moved(stage, start, stop, each)
        if places < wanted:
            if most_moved:
                depth = min(wanted, max(places, places - STASH_IN_TRANSIT + most_moved))
                while depth > places and self._least_flying(stage, start, stop, depth, most_moved, each) > free:
                    depth -= 1  # the more there are, the more messages may leave at once
            else:
                depth = self._deepest(stage, start, stop, places, wanted, free, each)
            if depth < min(wanted, self._least[stage]):
                return 0, stop, 0
        if most_moved:
            return self._fit_moving(stage, start, stop, depth, most_moved, free, each)
        return depth, self._first_kept(stage, start, stop, depth, free - depth * each), 0

    def _peak(self, stage: int, start: int, stop: int, depth: int) -> float:
        """Activations and messages if nothing is kept."""
        return self._spans[stage].bare_peak(start, stop, depth, recomputes=self._recomputes[stage])

    def _places(self, stage: int, start: int, stop: int, free: float, each: float, peak: float) -> int:
        """The most micro-batches in flight that fit into ``free`` bytes, where those wanted, of this peak, do not."""
        places = max(0, int((free - peak) // each)) if each else 0
        while (places + 1) * each + self._peak(stage, start, stop, places + 1) <= free:
            places += 1  # the fewer they are, the fewer messages may leave at once
        return places

    def _deepest(self, stage: int, start: int, stop: int, depth: int, wanted: int, free: float, each: float) -> int:
        """Depth beyond ``depth``, the most if nothing is kept: without an R, a stage may need less than it keeps."""
        for deeper in range(max(depth + 1, 2), wanted + 1):
            if self._first_kept(stage, start, stop, deeper, free - deeper * each) == stop:
                break
            depth = deeper
        return depth

    def _first_kept(self, stage: int, start: int, stop: int, depth: int, room: float, lowest: int | None = None) -> int:
        """First section from which on activations fit, from ``lowest`` on."""
        if not self._may_keep or stage == self._last or depth == 1:
            return stop
        return self._spans[stage].first_kept(start, stop, depth, room, lowest=start if lowest is None else lowest)

    def _fit_moving(
        self, stage: int, start: int, stop: int, depth: int, most_moved: int, free: float, each: float
    ) -> tuple[int, int, int]:
        """Choose the inputs that wait in host memory: activations are kept first, and inputs stay in what is left."""
        moved = _worth_moving(min(depth, most_moved))
        free -= Size(depth, 0, moved).on_device * each
        lowest = start + 1 if moved else start  # a stage without R has nothing that waits for it
        first_kept = self._first_kept(stage, start, stop, depth, free, lowest)
        if moved:
            free -= self._spans[stage].flying(start, first_kept, stop, depth)
            moved = _worth_moving(moved - int(free // each))
        return depth, first_kept, moved

    def _least_flying(self, stage: int, start: int, stop: int, depth: int, most_moved: int, each: float) -> float:
        """Bytes of that many micro-batches in flight if nothing is kept and the most inputs wait in host memory."""
        size = Size(depth, 0, _worth_moving(min(depth, most_moved)))
        return size.on_device * each + self._peak(stage, start, stop, depth)

    def _most_moved(self, stage: int, start: int, stop: int, each: float) -> int:
        """Number of a stage's inputs that host memory has room for."""
        if stage == self._last:
            return 0
        limit = self._spans[stage].host_limit_bytes
        if limit is None:
            return self._wanted[stage]
        return int((limit - self.host_bytes(stage, start, stop)) // each)

    def detail(self, stage: int, start: int, stop: int, size: Size, split_last: int | None = None) -> StageBytes:
        """Return the parts of the memory of stage ``stage`` with sections [start, stop).

        Args:
            stage: its number.
            start: its first section.
            stop: one past its last section.
            size: depth, and what is kept and moved.
            split_last: so many W's wait at most; None: all may.
        """
        spans, span = self._spans[stage], range(start, stop)
        profile = spans.profile
        kept = int(profile.activation_bytes.over(range(stop - size.kept, stop)))
        held = int(spans.held(start, stop - size.kept, stop))
        live, messages = spans.peak(start, stop, stop - size.kept, size.depth, recomputes=self._recomputes[stage])
        if split_last is None or size.kept < len(span):
            spared = 0
        else:
            spared = max(0, size.depth - 1 - split_last) * int(spans.more_held(start, stop))
        return StageBytes(
            **spans.state(start, stop)._asdict(),
            stash=(size.on_device + self._waiting[stage]) * spans.incoming[start]
            + size.on_device * int(profile.input_bytes.over(span))
            + int(spans.ahead(start, stop)),
            kept=kept + (size.depth - 1) * held - spared,
            live=int(live) - kept,
            messages=messages,
            update=int(spans.update(start, stop, self._copies)),
            host=self.host_bytes(stage, start, stop) + size.moved * entry_bytes(profile, span),
        )

    def least_bytes(self, stage: int, start: int, stop: int) -> int:
        """Peak at the least depth, keeping nothing."""
        least = self._least[stage]
        moves = self._stash_moves and stage < self._last and least > STASH_IN_TRANSIT
        return self.detail(stage, start, stop, Size(least, 0, least if moves else 0)).total

    def host_bytes(self, stage: int, start: int, stop: int) -> int:
        """Return the lasting bytes of sections [start, stop) in host memory beside a device."""
        return self._spans[stage].host_bytes(start, stop, self._copies)


def _worth_moving(inputs: int) -> int:
    """That many inputs, or none where those on their way would take more than is spared."""
    return inputs if inputs > STASH_IN_TRANSIT else 0


def entry_bytes(profile: Profile, span: range) -> int:
    """One input of a stage: what crosses into it, and the samples that it reads."""
    incoming = profile.boundary_bytes[span.start - 1] if span.start else 0
    return incoming + int(profile.input_bytes.over(span))


def crossing_time_s(profile: Profile, span: range, *, moved: int, depth: int) -> float:
    """Seconds per micro-batch of copying inputs to host memory and back, if ``moved`` of ``depth`` inputs move."""
    return 2 * entry_bytes(profile, span) * moved / depth / profile.calibration.crossing_bytes_per_s
