"""How deep, and keeping which activations, a stage runs within its memory: in-flight depth first, then keeping.

Depth beats keeping on slow links (reference/pipelines.md §2), and each kept section costs its activations once
per micro-batch in flight. So later stages, which hold fewer in flight, keep more, and get more sections.

Where the stash may move to host memory, activations are kept first, and entries of the stash stay in what is left.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from varuna.core.plan import SAMPLES_AHEAD, STASH_IN_TRANSIT
from varuna.planner.profile import Profile


class Size(NamedTuple):
    """What a stage does with its memory."""

    depth: int
    """n_k, micro-batches in flight."""
    kept: int
    """Its last sections that keep their activations."""
    moved: int = 0
    """Of the inputs in flight, those that wait in host memory."""

    @property
    def on_device(self) -> int:
        """Inputs that are on the device at once."""
        return self.depth - self.moved + (STASH_IN_TRANSIT if self.moved else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Where a stage's bytes go at its peak."""

    parameters: int
    gradients: int
    """One accumulator per section, also for tied parameters: a morph may part the sections."""
    optimizer: int
    reserved: int
    """What the job never gets."""
    stash: int
    """Inputs of the n_k micro-batches in flight, their samples, and inputs that have arrived and wait.

    Of those in host memory, the few that are on their way.
    """
    kept: int
    """Activations of kept sections, of all micro-batches in flight."""
    live: int
    """Activations of the other sections, of one micro-batch, and what its section at work needs beside them."""
    messages: int
    """At each end a message that leaves, and places for the next two that come."""
    copy: int
    """When nothing is in flight: parameters and state as they were, while a step is applied before the vote.

    Offloaded state is copied in host memory: here is what of it is on its way through the GPU.
    """
    host: int = 0
    """Offloaded optimizer state, its copy, and inputs that wait there: in host memory, no part of ``total``."""

    @property
    def state(self) -> int:
        """What is there all the time."""
        return self.parameters + self.gradients + self.optimizer + self.reserved

    @property
    def total(self) -> int:
        """The peak."""
        return self.state + max(self.stash + self.kept + self.live + self.messages, self.copy)


class Sizer:
    """Memory of the stages of one depth P, at one micro-batch size."""

    def __init__(
        self,
        profile: Profile,
        *,
        limit_bytes: int | None,
        wanted: Sequence[int],
        least: Sequence[int],
        may_keep: bool,
        host_limit_bytes: int | None = None,
        stash_moves: bool = False,
    ) -> None:
        """Prepare for the probes of a balancing.

        Args:
            profile: of the sections.
            limit_bytes: of a worker; None: unlimited, and unknown, so that nothing is kept.
            wanted: in-flight depth of each stage where memory allows.
            least: depth below which a stage does not fit.
            may_keep: whether activations of some sections may be kept, and others not.
            host_limit_bytes: of a worker's share of host memory; None: unlimited.
            stash_moves: inputs in flight may wait in host memory.
        """
        self._profile = profile
        self._limit_bytes = limit_bytes
        self._host_limit_bytes = host_limit_bytes
        self._streamed_bytes = profile.calibration.optimizer.streamed_bytes
        self._wanted = wanted
        self._least = least
        self._adaptive = may_keep
        self._may_keep = may_keep and limit_bytes is not None
        self._last = len(wanted) - 1
        self._stash_moves = stash_moves
        # What the stage before has sent and this one has not run yet waits here.
        self.waiting = (0, *(max(0, before - own) for before, own in pairwise(wanted)))
        self._reserved = profile.calibration.hardware.reserved_bytes
        self._tied = profile.calibration.tied
        gaps = [b - a for tied in self._tied for a, b in pairwise(tied.sections)]
        self._tied_span = min(gaps, default=profile.sections)  # shorter stages hold no parameter twice
        # A balance asks thousands of times: prefix sums at hand.
        self._work, self._recompute = profile.work_s.before, profile.recompute_s.before
        self._resident, self._activations = profile.resident_bytes.before, profile.activation_bytes.before
        self._own, self._inputs = profile.own_bytes.before, profile.input_bytes.before
        self._working, self._forward = profile.working_bytes.over, profile.forward_bytes.over
        self._incoming = (0, *profile.boundary_bytes[: profile.sections - 1])  # by first section
        self._front = [cut + posted for cut, posted in zip(profile.cut_bytes, self._incoming, strict=False)]
        posted_behind = (0, *profile.gradient_boundary_bytes[: profile.sections - 1], 0)
        self._rear = [cut + posted for cut, posted in zip(profile.cut_bytes, posted_behind, strict=True)]
        self._known_s: dict[tuple[int, int, int], float] = {}  # half of what a balance asks it has asked before

    def seconds(self, stage: int, start: int, stop: int) -> float:
        """Work for one micro-batch on a stage of sections [start, stop); infinite if they do not fit."""
        key = (stage, start, stop)
        known_s = self._known_s.get(key)
        if known_s is None:
            known_s = self._known_s[key] = self._seconds(stage, start, stop)
        return known_s

    def _seconds(self, stage: int, start: int, stop: int) -> float:
        work = self._work
        whole_s = work[stop] - work[start]
        if self._limit_bytes is None and self._host_limit_bytes is None:
            first_kept = stop
        else:
            size = self.size(stage, start, stop)
            if size is None:
                return float("inf")
            first_kept = stop - size.kept
            if size.moved:
                crossing_s = crossing_time_s(self._profile, range(start, stop), moved=size.moved, depth=size.depth)
                return max(whole_s + self._recompute[first_kept] - self._recompute[start], crossing_s)
        if stage == self._last or self._wanted[stage] == 1:
            return whole_s
        return whole_s + self._recompute[first_kept] - self._recompute[start]

    def size(self, stage: int, start: int, stop: int, *, most: int | None = None) -> Size | None:
        """Depth, at most ``most``, and kept sections; None if not even the least depth fits without keeping."""
        wanted = self._wanted[stage]
        if most is not None and most < wanted:
            wanted = most
        if self._host_limit_bytes is not None and self.host_bytes(start, stop) > self._host_limit_bytes:
            return None
        if self._limit_bytes is None:
            return Size(wanted, self._without_activations(stage, start, stop))
        resident, activations = self._resident, self._activations
        state = resident[stop] - resident[start] + self._reserved
        if stop - start > self._tied_span:
            state -= sum(self._counted_twice(start, stop))
        room = self._limit_bytes - state - self._front[start] - self._rear[stop] - self._live(stage, start, stop)
        if room < 0 or state + self._copy(start, stop) > self._limit_bytes:
            return None
        depth = wanted
        read_bytes, incoming = self._inputs[stop] - self._inputs[start], self._incoming[start]
        waiting_bytes = self.waiting[stage] * incoming + SAMPLES_AHEAD * read_bytes
        each, moved = incoming + read_bytes, 0
        if each:
            room -= waiting_bytes
            places = int(room // each)
            most_moved = self._most_moved(stage, start, stop, each) if places >= STASH_IN_TRANSIT else 0
            if places < wanted:
                depth = min(wanted, max(places, places - STASH_IN_TRANSIT + most_moved))
            if depth < min(wanted, self._least[stage]):
                return None
            moved = min(depth, most_moved) if depth > STASH_IN_TRANSIT else 0
            moved = moved if moved > STASH_IN_TRANSIT else 0
            room -= Size(depth, 0, moved).on_device * each
        if not self._may_keep or stage == self._last or depth == 1:
            first_kept = stop
        else:
            first_kept = bisect_left(activations, activations[stop] - room / (depth - 1), start, stop)
        if moved:
            first_kept = max(first_kept, start + 1)  # a stage without R has nothing that waits for it
            room -= (activations[stop] - activations[first_kept]) * (depth - 1)
            moved = max(0, moved - int(room // each))
            moved = moved if moved > STASH_IN_TRANSIT else 0
        return Size(depth, stop - first_kept, moved)

    def _most_moved(self, stage: int, start: int, stop: int, each: float) -> int:
        """Inputs of a stage that host memory has room for."""
        if not self._stash_moves or stage == self._last:
            return 0
        if self._host_limit_bytes is None:
            return self._wanted[stage]
        return int((self._host_limit_bytes - self.host_bytes(start, stop)) // each)

    def detail(self, stage: int, start: int, stop: int, size: Size) -> StageBytes:
        """Where the bytes go."""
        profile, span = self._profile, range(start, stop)
        twice_parameters, twice_optimizer = self._counted_twice(start, stop)
        parameters = int(profile.parameter_bytes.over(span)) - twice_parameters
        optimizer = int(profile.optimizer_bytes.over(span)) - twice_optimizer
        kept = int(profile.activation_bytes.over(range(stop - size.kept, stop)))
        return StageBytes(
            parameters=parameters,
            gradients=int(profile.gradient_bytes.over(span)),
            optimizer=optimizer,
            reserved=self._reserved,
            stash=(size.on_device + self.waiting[stage]) * self._incoming[start]
            + (size.on_device + SAMPLES_AHEAD) * int(profile.input_bytes.over(span)),
            kept=size.depth * kept,
            live=int(self._live(stage, start, stop)) - kept,
            messages=self._front[start] + self._rear[stop],
            copy=int(self._copy(start, stop)),
            host=self.host_bytes(start, stop) + size.moved * entry_bytes(profile, span),
        )

    def least_bytes(self, stage: int, start: int, stop: int) -> int:
        """Peak at the least depth, keeping nothing."""
        least = self._least[stage]
        moves = self._stash_moves and stage < self._last and least > STASH_IN_TRANSIT
        return self.detail(stage, start, stop, Size(least, 0, least if moves else 0)).total

    def host_bytes(self, start: int, stop: int) -> int:
        """Offloaded state of sections [start, stop), and the copy that a tentative step makes of it."""
        span = range(start, stop)
        return int(
            self._profile.host_bytes.over(span) + (self._profile.host_copy_bytes.over(span) if self._last else 0)
        )

    @property
    def state_bytes(self) -> float:
        """State of all stages together: below it no partition fits."""
        whole = self._resident[-1] + len(self._wanted) * self._reserved
        return whole - sum(self._counted_twice(0, self._profile.sections))

    def _without_activations(self, stage: int, start: int, stop: int) -> int:
        """Last sections that have none to keep: all of a stage without gradients, which then needs no R."""
        if not self._adaptive or stage == self._last:
            return 0
        return stop - bisect_left(self._activations, self._activations[stop], start, stop)

    def _live(self, stage: int, start: int, stop: int) -> float:
        """Activations of a micro-batch and what a section at work needs; another's F may run beside them."""
        activations = self._activations
        working = self._working(start, stop) - activations[start]
        if stage == self._last or self._wanted[stage] == 1:
            return working
        return max(working, activations[stop] - activations[start] + self._forward(start, stop))

    def _copy(self, start: int, stop: int) -> float:
        """What a tentative step copies (a lone stage applies none), and what is streamed meanwhile."""
        streamed = self._streamed_bytes and min(
            self._streamed_bytes, self._profile.state_bytes.over(range(start, stop))
        )
        own = self._own[stop] - self._own[start]
        if not self._last or not own:
            return streamed
        return streamed + (own - sum(self._counted_twice(start, stop)) if stop - start > self._tied_span else own)

    def _counted_twice(self, start: int, stop: int) -> tuple[int, int]:
        """Parameter and optimizer bytes of tied parameters beyond their first section in the stage."""
        parameters = optimizer = 0
        profile = self._profile
        for tied in self._tied:
            for index in [section for section in tied.sections if start <= section < stop][1:]:
                parameters += tied.size_bytes
                if profile.trainable_bytes[index]:  # its share of the section's optimizer state
                    state = int(profile.optimizer_bytes.values[index])
                    optimizer += state * tied.size_bytes // profile.trainable_bytes[index]
        return parameters, optimizer


def entry_bytes(profile: Profile, span: range) -> int:
    """One input of a stage: what crosses into it, and the samples that it reads."""
    incoming = profile.boundary_bytes[span.start - 1] if span.start else 0
    return incoming + int(profile.input_bytes.over(span))


def crossing_time_s(profile: Profile, span: range, *, moved: int, depth: int) -> float:
    """What the way between the memories is busy for per micro-batch: so many of ``depth`` inputs go there and back."""
    return 2 * entry_bytes(profile, span) * moved / depth / profile.calibration.crossing_bytes_per_s
