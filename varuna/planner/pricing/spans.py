"""Bytes that consecutive sections need on any stage: balancing asks 100,000 times for a few hundred such spans."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from varuna.planner.pricing.profile import Profile
from varuna.planner.pricing.sharded_optimizer import UNSHARDED, Sharding, sharding_of
from varuna.schedule.buffers import ACTIVATIONS_COMING, GRADIENTS_COMING, MESSAGES_LEAVING, SAMPLES_AHEAD


class Room(NamedTuple):
    """The memory that sections [start, stop) leave for micro-batches in flight."""

    free_bytes: float
    """Memory beyond state, messages, live activations and samples that are read ahead; negative: it does not fit."""
    incoming_bytes: int
    """Bytes of a micro-batch that waits for its F."""
    each_bytes: float
    """Bytes of a micro-batch in flight: what came in, and its samples."""


_NONE = Room(-1.0, 0, 0)


class Replication(NamedTuple):
    """What the number of replicas D changes about the memory of a stage."""

    sharing: int = 1
    """replicas that divide optimizer state"""
    adds_copies: bool = False
    """replicas add up copies of their sums, in the same memory, as on a CPU: room for one section's stays"""


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
        reads_here: bool = False,
    ) -> None:
        """Prepare prefix sums.

        Args:
            profile: of the sections.
            limit_bytes: of a worker; None: unlimited, and unknown, so that nothing is kept.
            host_limit_bytes: of a worker's share of host memory; None: unlimited.
            replication: what D changes.
            splits: backwards may run as I and W, on all stages but the first.
            reads_here: samples are read into the same memory, as on a CPU.
        """
        self.profile, self.limit_bytes, self.host_limit_bytes = profile, limit_bytes, host_limit_bytes
        self.reserved = profile.calibration.hardware.reserved_bytes
        self._streamed_bytes = profile.calibration.optimizer.streamed_bytes
        self._together = profile.calibration.optimizer.together
        self._tied = profile.calibration.tied
        gaps = [b - a for tied in self._tied for a, b in pairwise(tied.sections)]
        self._tied_span = min(gaps, default=profile.sections)  # shorter stages hold no parameter twice
        self._resident, self._activations = profile.resident_bytes.before, profile.activation_bytes.before
        self._own, self._inputs = profile.own_bytes.before, profile.input_bytes.before
        self._working, self._forward = profile.working_bytes.over, profile.forward_bytes
        self._inner_forward = profile.inner_forward_bytes.over
        self._being_read = int(self._inputs[-1]) if reads_here else 0
        self._splitting, self._weighing = profile.splitting_bytes.over, profile.weighing_bytes.over
        self._queued = profile.queued_bytes.before
        self._splits = splits and self._queued[-1] > 0
        self.incoming = (0, *profile.boundary_bytes[: profile.sections - 1])
        """Bytes that come in, by first section of a stage."""
        self._kept_from = _keeping(self._activations, self.incoming)
        behind = (*profile.boundary_bytes[: profile.sections - 1], 0)
        back = (0, *profile.gradient_boundary_bytes[: profile.sections - 1], 0)
        self._front = [there + ACTIVATIONS_COMING * into for there, into in zip(back, self.incoming, strict=False)]
        self._rear = [0, *(MESSAGES_LEAVING * a + GRADIENTS_COMING * b for a, b in zip(behind, back[1:], strict=True))]
        self._replicas = replication.sharing if profile.calibration.optimizer.sharded else 1
        self._adds_copies = replication.adds_copies
        self._has_host_bytes = bool(profile.host_bytes.before[-1])
        self._has_updates = bool(profile.update_bytes.before[-1] or self._streamed_bytes or self._replicas > 1)
        self._sharding: dict[tuple[int, int], Sharding] = {}
        self._rooms: dict[tuple[int, int, bool, bool], Room] = {}
        self._known_s: dict[tuple[int, ...], dict[tuple[int, int], float]] = {}

    def known_s(self, role: tuple[int, ...]) -> dict[tuple[int, int], float]:
        """Where seconds of spans may be noted, for all stages of whatever depth P whose role is the same."""
        return self._known_s.setdefault(role, {})

    def room(self, start: int, stop: int, recomputes: bool, copies: bool) -> Room:
        """Return the memory that sections [start, stop) leave for micro-batches in flight."""
        key = (start, stop, recomputes, copies)
        known = self._rooms.get(key)
        if known is None:
            known = self._rooms[key] = self._room(*key)
        return known

    def _room(self, start: int, stop: int, recomputes: bool, copies: bool) -> Room:
        limit = float("inf") if self.limit_bytes is None else self.limit_bytes
        host_limit = float("inf") if self.host_limit_bytes is None else self.host_limit_bytes
        state = self._resident[stop] - self._resident[start] + self.reserved
        if stop - start > self._tied_span:
            state -= sum(self.counted_twice(start, stop))
        state += self.copied_sums(start, stop) - self.lent(start, stop)
        free = limit - state - self.messages(start, stop) - self.live(start, stop, recomputes)
        is_over = free < 0 or state + self.update(start, stop, copies) > limit
        if is_over or self.host_bytes(start, stop, copies) > host_limit:
            return _NONE
        read, incoming = self._inputs[stop] - self._inputs[start], self.incoming[start]
        return Room(free - self.ahead(start, stop), incoming, incoming + read)

    def ahead(self, start: int, stop: int) -> float:
        """Samples that a stage reads ahead: what it needs of them, and all of those that are being read."""
        read = self._inputs[stop] - self._inputs[start]
        return SAMPLES_AHEAD * read + self._being_read if read else 0.0

    def first_kept(self, start: int, stop: int, room_bytes: float) -> int:
        """First section of a stage from which activations are kept, within the room of a micro-batch in flight."""
        if self.held(start, start, stop) <= room_bytes:
            return start
        return bisect_left(self._kept_from, self._activations[stop] - room_bytes, start + 1, stop)

    def held(self, start: int, first_kept: int, stop: int) -> float:
        """What a micro-batch in flight holds beside its input: kept activations, and what the first of them began with.

        The input of the stage is in the stash; of any other section the one before has made it, and has not kept it.
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

    def messages(self, start: int, stop: int) -> int:
        """Bytes at both ends: messages that leave, and buffers for the next ones that arrive.

        Inputs that have come, and gradients that the stage before has not taken, count in the stash: of a micro-batch
        that is in flight there, this stage has one or the other.
        """
        return self._front[start] + self._rear[stop]

    def live(self, start: int, stop: int, recomputes: bool) -> float:
        """Activations of a micro-batch and what a section at work needs; another's F may run beside an R.

        Between I and W of a section, what its linears took and the gradients of what they made take their place. F of
        any section but a stage's first, whose input is in the stash, also has what the section before has made.
        """
        activations = self._activations
        working = self._working(start, stop) - activations[start]
        if self._splits and start:
            queued = self._queued
            splitting = self._splitting(start, stop) + queued[stop] - activations[start]
            working = max(working, splitting, self._weighing(start, stop) - queued[start])
        if not recomputes:
            return working
        forward = self._forward[start]
        if stop - start > 1:
            forward = max(forward, self._inner_forward(start + 1, stop))
        return max(working, activations[stop] - activations[start] + forward)

    def update(self, start: int, stop: int, copies: bool) -> float:
        """Bytes that the optimizer needs while it steps, with streamed state and the copies of a tentative step."""
        if not copies and not self._has_updates:
            return 0.0
        profile, span, sharding = self.profile, range(start, stop), self.sharding(start, stop)
        needed = profile.update_bytes.over(span) if self._together else profile.most_update_bytes.over(start, stop)
        if self._streamed_bytes:
            needed += min(self._streamed_bytes, profile.state_bytes.over(span))
        own = self._own[stop] - self._own[start]
        if not copies or not own:
            return max(needed, sharding.gathered)
        own -= sharding.absent_state + sharding.absent_parameters
        if stop - start > self._tied_span:
            own -= sum(self.counted_twice(start, stop))
        return max(needed + own, sharding.gathered)

    def host_bytes(self, start: int, stop: int, copies: bool) -> int:
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
        """What a sharded optimizer changes; nothing where every replica holds everything."""
        if self._replicas == 1:
            return UNSHARDED
        known = self._sharding.get((start, stop))
        if known is None:
            known = self._sharding[start, stop] = sharding_of(self.profile, start, stop, self._replicas)
        return known

    def copied_sums(self, start: int, stop: int) -> int:
        """Room in which the sums of one section after another are added to those of other replicas."""
        return int(self.profile.most_gradient_bytes.over(start, stop)) if self._adds_copies else 0

    def lent(self, start: int, stop: int) -> int:
        """Optimizer state that would be on the device, but is on other replicas."""
        on_host = self.profile.calibration.optimizer.host_bytes_per_s is not None
        return 0 if on_host else self.sharding(start, stop).absent_state

    def counted_twice(self, start: int, stop: int) -> tuple[int, int]:
        """Parameter and optimizer bytes of tied parameters beyond their first section in the span."""
        parameters = optimizer = 0
        profile = self.profile
        for tied in self._tied:
            for index in [section for section in tied.sections if start <= section < stop][1:]:
                parameters += tied.size_bytes
                if (
                    profile.trainable_bytes[index] and not self.sharding(start, stop).absent_state
                ):  # its share of the section's optimizer state
                    state = int(profile.optimizer_bytes.values[index])
                    optimizer += state * tied.size_bytes // profile.trainable_bytes[index]
        return parameters, optimizer


def _keeping(activations: Sequence[float], incoming: Sequence[int]) -> list[float]:
    """For each first kept section, activations before it, less what it takes; ascending, for a bisection."""
    kept = [before - taken for before, taken in zip(activations, incoming, strict=False)]
    return list(accumulate(reversed(kept), min))[::-1]
