"""Bytes that consecutive sections need on any stage: balancing asks 100,000 times for a few hundred such spans."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple

from varuna.core.devices import STAGING_BYTES
from varuna.planner.pricing.profile import Profile
from varuna.planner.pricing.sharded_optimizer import UNSHARDED, Sharding, sharding_of
from varuna.schedule.buffers import ACTIVATIONS_COMING, GRADIENTS_COMING, MESSAGES_LEAVING, SAMPLES_AHEAD


def pinned_bytes(profile: Profile, span: range, replicas: int) -> int:
    """Bytes for a checkpoint, for the largest section's sums, and for parts that are on their way to other ranks.

    Of a checkpoint, each of ``replicas`` copies what it writes, and what it writes if another one is lost.
    """
    saved_bytes = profile.state_bytes.over(span) * min(1.0, 2 / replicas)
    summed_bytes = profile.most_gradient_bytes.over(span.start, span.stop) if replicas > 1 else 0
    return int(saved_bytes + summed_bytes) + STAGING_BYTES


class ActivationBudget(NamedTuple):
    """The memory that sections [start, stop) leave for micro-batches in flight."""

    free_bytes: float
    """Memory beyond state and samples that are read ahead; negative: it does not fit."""
    incoming_bytes: int
    """Bytes of a micro-batch that waits for its F."""
    each_bytes: float
    """Bytes of a micro-batch in flight: what came in, and its samples."""


_NONE = ActivationBudget(-1.0, 0, 0)


class StateBytes(NamedTuple):
    """Bytes of sections that are in use throughout a step, or that only grow while it runs."""

    parameters: int
    """With places for those that are streamed."""
    gradients: int
    """One accumulator per section, also for tied parameters: a morph may part the sections.

    On a CPU with D > 1, room for the largest as well: sums of one section after another are added up in a copy.
    """
    optimizer: int
    """Without what other replicas hold."""
    reserved: int
    """Memory that a job never gets."""
    statistics: int
    """Bytes that micro-batches leave for buffers until the step is applied, and the buffers, before and after it."""
    staged: int
    """Offloaded state on its way through a GPU: memory that torch keeps for the stream of its copies."""


_DEEP = MESSAGES_LEAVING + 2
"""From this depth on, more micro-batches in flight have no more messages."""


class PeakMoment(Enum):
    """The action at which a stage needs most memory."""

    FORWARD = "F, while another micro-batch waits for its gradient"
    RECOMPUTE = "R"
    BACKWARD = "B, or I, or W"


class Replication(NamedTuple):
    """Changes that the number of replicas D makes to the memory of a stage."""

    sharing: int = 1
    """replicas that divide optimizer state"""
    adds_copies: bool = False
    """replicas add up copies of their sums, in the same memory, as on a CPU: room for one section's stays"""
    noting: int = 0
    """micro-batches of a replica that leave statistics for buffers"""
    all_noting: int = 0
    """likewise, of all replicas"""
    saving: int = 0
    """replicas that divide a checkpoint, in the memory of hosts; 0: devices have none of their own"""


ALONE = Replication()


class Spans:
    """Bytes of sections [start, stop) at one micro-batch size, within the memory of one worker."""

    def __init__(
        self,
        profile: Profile,
        *,
        limit_bytes: int | None = None,
        host_limit_bytes: int | None = None,
        replication: Replication = ALONE,
        splits: bool = False,
        one_memory: bool = False,
    ) -> None:
        """Prepare prefix sums.

        Args:
            profile: of the sections.
            limit_bytes: of a worker; None: unlimited, and unknown, so that nothing is kept.
            host_limit_bytes: of a worker's share of host memory; None: unlimited.
            replication: what D changes.
            splits: backwards may run as I and W, on all stages but the first.
            one_memory: samples are read, and messages come, into the memory that computes, as on a CPU.
        """
        self.profile, self.limit_bytes, self.host_limit_bytes = profile, limit_bytes, host_limit_bytes
        self._streamed_bytes = profile.calibration.optimizer.streamed_bytes
        self._stages_state = profile.calibration.optimizer.host_bytes_per_s is not None
        self._together = profile.calibration.optimizer.together
        self._tied = profile.calibration.tied
        gaps = [b - a for tied in self._tied for a, b in pairwise(tied.sections)]
        self._tied_span = min(gaps, default=profile.sections)  # shorter stages hold no parameter twice
        self._activations, self._inputs = profile.activation_bytes.before, profile.input_bytes.before
        self._working, self._forward = profile.working_bytes.over, profile.forward_bytes
        self._inner_forward = profile.inner_forward_bytes.over
        self._being_read = int(self._inputs[-1]) if one_memory else 0
        self._one_memory = one_memory
        self._recording = profile.recording_bytes.over
        self._splitting, self._weighing = profile.splitting_bytes.over, profile.weighing_bytes.over
        self._queued = profile.queued_bytes.before
        self._splits = splits and self._queued[-1] > 0
        self.incoming = (0, *profile.boundary_bytes[: profile.sections - 1])
        """Bytes that come in, by first section of a stage."""
        self._kept_from = _keeping(self._activations, self.incoming)
        behind = (*profile.boundary_bytes[: profile.sections - 1], 0)
        back = (0, *profile.gradient_boundary_bytes[: profile.sections - 1], 0)
        self._front = [there + ACTIVATIONS_COMING * into for there, into in zip(back, self.incoming, strict=False)]
        self._leaving, self._returning = (0, *behind), back
        self._replicas = replication.sharing if profile.calibration.optimizer.sharded else 1
        self._adds_copies = replication.adds_copies
        self._noting, self._all_noting = replication.noting, replication.all_noting
        self._has_host_bytes = bool(profile.host_bytes.before[-1])
        self._saving = replication.saving
        others_note = profile.statistics_bytes.before[-1] > 0 and self._all_noting > self._noting
        self._has_updates = bool(
            profile.update_bytes.before[-1] or self._streamed_bytes or self._replicas > 1 or others_note
        )
        self._sharding: dict[tuple[int, int], Sharding] = {}
        self._rooms: dict[tuple[int, int, bool], ActivationBudget] = {}
        self._peaks: dict[tuple[int, int, int, bool], float] = {}
        self._works: dict[tuple[int, int], float] = {}
        self._known_s: dict[tuple[int, ...], dict[tuple[int, int], float]] = {}

    def known_s(self, role: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Return the notes on seconds of spans, shared by all stages of whatever depth P that have the same role."""
        return self._known_s.setdefault(role, {})

    def room(self, start: int, stop: int, copies: bool) -> ActivationBudget:
        """Return the memory that sections [start, stop) leave for micro-batches in flight."""
        key = (start, stop, copies)
        known = self._rooms.get(key)
        if known is None:
            known = self._rooms[key] = self._room(*key)
        return known

    def _room(self, start: int, stop: int, copies: bool) -> ActivationBudget:
        limit = float("inf") if self.limit_bytes is None else self.limit_bytes
        host_limit = float("inf") if self.host_limit_bytes is None else self.host_limit_bytes
        state = sum(self.state(start, stop))
        free = limit - state
        if state + self.update(start, stop, copies) > limit or self.host_bytes(start, stop, copies) > host_limit:
            return _NONE
        read, incoming = self._inputs[stop] - self._inputs[start], self.incoming[start]
        return ActivationBudget(free - self.ahead(start, stop), incoming, incoming + read)

    def state(self, start: int, stop: int) -> StateBytes:
        """Return the parts of what is in use throughout a step."""
        profile, span = self.profile, range(start, stop)
        twice_parameters, twice_optimizer = self._counted_twice(start, stop)
        own_bytes = int(profile.parameter_bytes.over(span) - profile.streamed_bytes.over(span))
        copied_bytes = int(profile.most_gradient_bytes.over(start, stop)) if self._adds_copies else 0
        on_host = profile.calibration.optimizer.host_bytes_per_s is not None
        absent_bytes = 0 if on_host else self.sharding(start, stop).absent_state
        return StateBytes(
            parameters=own_bytes - twice_parameters + profile.streaming_bytes(start, stop),
            gradients=int(profile.gradient_bytes.over(span)) + copied_bytes,
            optimizer=int(profile.optimizer_bytes.over(span)) - twice_optimizer - absent_bytes,
            reserved=profile.calibration.hardware.reserved_bytes,
            statistics=int((self._noting + 2) * profile.statistics_bytes.over(span)),
            staged=self._streamed(start, stop) if self._stages_state else 0,
        )

    def ahead(self, start: int, stop: int) -> float:
        """Samples that a stage reads ahead: what it needs of them, and all of those that are being read."""
        read = self._inputs[stop] - self._inputs[start]
        return SAMPLES_AHEAD * read + self._being_read if read else 0.0

    def first_kept(self, start: int, stop: int, depth: int, room_bytes: float, *, lowest: int) -> int:
        """First section of a stage from which activations are kept by micro-batches in flight; ``stop``: nothing fits.

        Args:
            start: first section of the stage.
            stop: one past its last section.
            depth: n_k, more than 1.
            room_bytes: for activations, messages, and what other micro-batches in flight hold beside their inputs.
            lowest: the first section that may be kept.
        """
        others = depth - 1
        if lowest == start:
            bare_peak = self.bare_peak(start, stop, depth, recomputes=True)  # no less than without an R
            if bare_peak + others * self.held(start, start, stop) <= room_bytes:
                return start
        # Kept activations are there while sections before them run again: the peak may be more than with none kept.
        at_work = self.at_work(start, stop) + self.messages(start, stop, depth, PeakMoment.BACKWARD)
        for first in range(self._first_within(start, stop, (room_bytes - at_work) / others), stop):
            if first >= lowest and self.flying(start, first, stop, depth) <= room_bytes:
                return first
        return stop

    def _first_within(self, start: int, stop: int, room_bytes: float) -> int:
        """No section before this one may be the first that a micro-batch in flight keeps in that room."""
        if self.held(start, start, stop) <= room_bytes:
            return start
        return bisect_left(self._kept_from, self._activations[stop] - room_bytes, start + 1, stop)

    def flying(self, start: int, first_kept: int, stop: int, depth: int) -> float:
        """Bytes at the peak beside inputs that are in flight; arguments as of ``peak``."""
        peak = sum(self.peak(start, stop, first_kept, depth, recomputes=True))
        return peak + (depth - 1) * self.held(start, first_kept, stop)

    def held(self, start: int, first_kept: int, stop: int) -> float:
        """Return what a micro-batch in flight holds beside its input: kept activations, and what the first began with.

        The stash has the stage's input; any other section's was made by the section before, which has not kept it.
        Where all is kept, W's wait for idle time: what they wait with may be more (``more_held``).
        """
        activations = self._activations[stop] - self._activations[first_kept]
        if start < first_kept:
            return activations + self.incoming[first_kept] if first_kept < stop else activations
        return activations + self.more_held(start, stop)

    def more_held(self, start: int, stop: int) -> float:
        """By how much that is more for a micro-batch whose W waits: its input is through."""
        if not self._splits or not start:
            return 0.0
        each = self.incoming[start] + self._inputs[stop] - self._inputs[start]
        activations = self._activations[stop] - self._activations[start]
        return max(0.0, self._queued[stop] - self._queued[start] - each - activations)

    def bare_peak(self, start: int, stop: int, depth: int, *, recomputes: bool) -> float:
        """Bytes of activations and messages at their peak if nothing is kept; arguments as of ``peak``."""
        key = start, stop, min(depth, _DEEP), recomputes
        known = self._peaks.get(key)
        if known is None:
            known = self._peaks[key] = sum(self.peak(start, stop, stop, key[2], recomputes=recomputes))
        return known

    def peak(self, start: int, stop: int, first_kept: int, depth: int, *, recomputes: bool) -> tuple[float, int]:
        """Activations and messages, without what micro-batches in flight hold, when both together are most.

        Args:
            start: first section of the stage.
            stop: one past its last section.
            first_kept: first section that keeps its activations; ``stop`` if none does.
            depth: n_k.
            recomputes: some micro-batch may need an R.

        Returns:
            Bytes of activations and what a section at work needs, and bytes of messages.
        """
        moments = (
            (self.at_work(start, stop), self.messages(start, stop, depth, PeakMoment.BACKWARD)),
            (self._recorded(start, stop, first_kept), self.messages(start, stop, depth, PeakMoment.RECOMPUTE)),
            (self._beside(start, stop, first_kept, recomputes), self.messages(start, stop, depth, PeakMoment.FORWARD)),
        )
        return max(moments, key=sum)

    def messages(self, start: int, stop: int, depth: int, moment: PeakMoment) -> int:
        """Bytes at both ends: messages that leave, and buffers for the next ones that arrive.

        Inputs that have come, and gradients that the stage before has not taken, count in the stash: of a micro-batch
        that is in flight there, this stage has one or the other.

        F only begins with a place for what it makes. Of a micro-batch whose backward is at work nothing leaves any
        more, and its gradient has left its place. The place is given to the next one when another gradient has come,
        of which nothing leaves either.

        Args:
            start: first section of the stage.
            stop: one past its last section.
            depth: n_k.
            moment: what the stage does.
        """
        leaving, returning = self._leaving[stop], self._returning[stop]
        if moment is PeakMoment.BACKWARD:
            rear = min(MESSAGES_LEAVING, depth - 1) * leaving + (GRADIENTS_COMING - 1) * returning
            if depth > 1:
                rear = max(rear, min(MESSAGES_LEAVING, depth - 2) * leaving + GRADIENTS_COMING * returning)
        else:
            most = min(MESSAGES_LEAVING, depth) - (moment is PeakMoment.FORWARD)
            rear = most * leaving + GRADIENTS_COMING * returning
        return self._front[start] + rear

    def at_work(self, start: int, stop: int) -> float:
        """Activations of a micro-batch whose backward runs, and what the section at work needs.

        Between I and W of a section, what its linears took and the gradients of what they made take their place.
        """
        known = self._works.get((start, stop))
        if known is None:
            activations, queued = self._activations, self._queued
            known = self._held_to(self._working, start, stop) - activations[start]
            if self._splits and start:
                splitting = self._held_to(self._splitting, start, stop) + queued[stop] - activations[start]
                known = max(known, splitting, self._weighing(start, stop) - queued[start])
            self._works[start, stop] = known
        return known

    def _held_to(self, needed: Callable[[int, int], float], start: int, stop: int) -> float:
        """Return what sections need with the message that has come: it is whole until its last gradient was used.

        On a GPU that message is not there: its contents were copied apart.
        """
        came = self._returning[stop] if self._one_memory else 0
        if not came or stop - start == 1:
            return needed(start, stop)
        return max(needed(start, stop), needed(start, stop - 1) + came)

    def _recorded(self, start: int, stop: int, first_kept: int) -> float:
        """Activations of a micro-batch whose R runs, kept ones included, and what the section at work needs."""
        activations = self._activations
        if start == first_kept:
            return activations[stop] - activations[start]
        kept = activations[stop] - activations[first_kept]
        return self._recording(start, first_kept) - activations[start] + kept

    def _beside(self, start: int, stop: int, first_kept: int, recomputes: bool) -> float:
        """Activations of a micro-batch that waits for its gradient, and what F of another one needs beside them.

        F of any section but a stage's first, whose input is in the stash, also has what the section before has made.
        Until it gets to the kept sections, its micro-batch does not hold what others in flight do. At its end there is
        what F has made twice: the message is a copy.
        """
        made, activations = 2 * self._leaving[stop], self._activations[stop] - self._activations[start]
        if not recomputes:
            return max(activations + made, self._forward_peak(start, stop, start))
        before = self._forward_peak(start, first_kept, start) - self.held(start, first_kept, stop)
        return activations + max(made, before, self._forward_peak(first_kept, stop, start))

    def _forward_peak(self, start: int, stop: int, stage_start: int) -> float:
        """Return what F needs in sections [start, stop) of a stage."""
        if start >= stop:
            return 0.0
        if start > stage_start:
            return self._inner_forward(start, stop)
        inner = self._inner_forward(start + 1, stop) if stop - start > 1 else 0.0
        return max(self._forward[start], inner)

    def update(self, start: int, stop: int, copies: bool) -> float:
        """Bytes that the optimizer needs while it steps, with streamed state and the copies of a tentative step.

        By then there are the other replicas' statistics, too.
        """
        if not copies and not self._has_updates:
            return 0.0
        profile, span, sharding = self.profile, range(start, stop), self.sharding(start, stop)
        needed = profile.update_bytes.over(span) if self._together else profile.most_update_bytes.over(start, stop)
        if not self._stages_state:
            needed += self._streamed(start, stop)
        needed += (self._all_noting - self._noting) * profile.statistics_bytes.over(span)
        own = profile.own_bytes.over(span) if copies else 0
        if own:
            own -= sharding.absent_state + sharding.absent_parameters + sum(self._counted_twice(start, stop))
        return max(needed + own, sharding.gathered)

    def _streamed(self, start: int, stop: int) -> int:
        return int(min(self._streamed_bytes, self.profile.state_bytes.over(range(start, stop))))

    def host_bytes(self, start: int, stop: int, copies: bool) -> int:
        """Return a stage's lasting bytes in host memory beside a device: offloaded state, its copy, what is pinned.

        Without a device, parameters that are streamed rest in a file.
        """
        pinned = pinned_bytes(self.profile, range(start, stop), self._saving) if self._saving else 0
        if self._saving and self.profile.streams(start, stop):
            pinned += int(self.profile.streamed_bytes.over(range(start, stop)))
        return self._offloaded(start, stop, copies) + pinned

    def _offloaded(self, start: int, stop: int, copies: bool) -> int:
        """Offloaded state, and the copy that a tentative step makes of it."""
        if not self._has_host_bytes:
            return 0
        profile, span = self.profile, range(start, stop)
        held = profile.host_bytes.over(span)
        sharding = self.sharding(start, stop)
        copied = (
            profile.host_copy_bytes.over(span) - sharding.absent_state - sharding.absent_parameters if copies else 0
        )
        return int(held - sharding.absent_state + copied)

    def sharding(self, start: int, stop: int) -> Sharding:
        """Return what a sharded optimizer changes; nothing where every replica holds everything."""
        if self._replicas == 1:
            return UNSHARDED
        known = self._sharding.get((start, stop))
        if known is None:
            known = self._sharding[start, stop] = sharding_of(self.profile, start, stop, self._replicas)
        return known

    def _counted_twice(self, start: int, stop: int) -> tuple[int, int]:
        """Parameter and optimizer bytes of tied parameters beyond their first section in the span."""
        parameters = optimizer = 0
        if stop - start <= self._tied_span:
            return 0, 0
        profile = self.profile
        for tied in self._tied:
            for index in [section for section in tied.sections if start <= section < stop][1:]:
                if profile.streamed_bytes.values[index] < tied.size_bytes:  # else each section has its own in a place
                    parameters += tied.size_bytes
                if (
                    profile.trainable_bytes[index] and not self.sharding(start, stop).absent_state
                ):  # its share of the section's optimizer state
                    state = int(profile.optimizer_bytes.values[index])
                    optimizer += state * tied.size_bytes // profile.trainable_bytes[index]
        return parameters, optimizer


def _keeping(activations: Sequence[float], incoming: Sequence[int]) -> list[float]:
    """For each first kept section, the most that it or one before spares, less what it takes; for a bisection."""
    kept = [before - taken for before, taken in zip(activations, incoming, strict=False)]
    return list(accumulate(kept, max))
