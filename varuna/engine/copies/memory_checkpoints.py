"""Memory checkpoints: the state of every few steps, in the memory of the worker that made it and of another one.

    step    s          s+1   ...                       s+j
    vote    keep                                       kept by all
            all copy   each sends its copy to its      those of
            their      keeper, beside the training     before s
            state      ----------------------------->  are dropped

Rank 0 says in a vote after which step they are made, and each rank in every vote whether its keeper has its newest. If
a worker is lost, all go back to the newest step of which those that are left have all state.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import JSON, SectionState
from varuna.core.errors import CheckpointError
from varuna.core.messages import HeldCheckpoint
from varuna.core.units import format_bytes
from varuna.core.vote import StepTotals
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.transport import Group
from varuna.engine.copies import wire
from varuna.engine.copies.keeping import has_room
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes, from_bytes
from varuna.engine.device.host_copies import HostCopies, Ready
from varuna.process.console import warn
from varuna.process.threads import start
from varuna.schedule.copy_pace import checkpoint_pause_s

_PATIENCE = 10
"""So many times the usual interval: then a next one is made, though the newest has not come to all keepers."""


@dataclass(slots=True)
class _Part:
    """The state of a stage."""

    layouts: Sequence[SectionLayout]
    memory: Tensor
    is_whole: bool

    def states(self) -> dict[int, SectionState]:
        found, first = {}, 0
        for layout in self.layouts:
            found[layout.section] = layout.state_in(self.memory[first : first + layout.size_bytes])
            first += layout.size_bytes
        return found


@dataclass(slots=True)
class _Checkpoint:
    generation: int
    step: int
    own: _Part | None = None
    others: _Part | None = None
    loop: JSON = None
    is_everywhere: bool = False

    def parts(self) -> list[_Part]:
        return [part for part in (self.own, self.others) if part is not None and part.is_whole]


class Made(NamedTuple):
    """A worker's own part of a memory checkpoint, to be sent."""

    step: int
    header: bytes
    body: Body
    copied: Ready
    """until then it is being copied from the device"""


class MemoryCheckpoints:
    """What a worker has of memory checkpoints: its own stage's state, and that of the stage whose copies it keeps.

    They outlive generations. What has come to all keepers stays until a newer one has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[_Checkpoint] = []
        self._free: dict[bool, Tensor] = {}  # for a next own part, which may be pinned, and for another's

    def make(
        self, generation: int, step: int, states: Mapping[int, SectionState], copies: HostCopies, loop: JSON
    ) -> Made | None:
        """Copy the state of this worker's stage, with that of the training loop; None if there is no room.

        What was made before in this generation, and is not everywhere, is dropped.

        Raises:
            CheckpointError: a tensor's dtype has no name.
        """
        layouts = [SectionLayout.of(states[section]) for section in sorted(states)]
        with self._lock:
            self._drop(lambda each: each.generation == generation and not each.is_everywhere and each.step != step)
            memory = self._room(layouts, copies.arena, own=True)
            if memory is None:
                return None
            checkpoint = self._of(generation, step)
            checkpoint.own, checkpoint.loop = _Part(layouts, memory, is_whole=False), loop
        copied = Body.of_states(layouts, states).leave(memory, copies)
        return Made(step, as_bytes(layouts), Body.of_memory([memory]), copied)

    def complete_own(self, generation: int, step: int) -> bool:
        """The copy of what was made has left the device; False if nobody needs it any more."""
        return self._complete(generation, step, lambda each: each.own)

    def begin_others(self, generation: int, step: int, layouts: Sequence[SectionLayout]) -> Body | None:
        """Room for another worker's part; None if there is none."""
        with self._lock:
            memory = self._room(layouts, lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8), own=False)
            if memory is None:
                return None
            self._of(generation, step).others = _Part(layouts, memory, is_whole=False)
            return Body.of_memory([memory])

    def complete_others(self, generation: int, step: int) -> bool:
        """All of it has come; False if nobody needs it any more."""
        return self._complete(generation, step, lambda each: each.others)

    def _complete(self, generation: int, step: int, of: Callable[[_Checkpoint], _Part | None]) -> bool:
        with self._lock:
            for each in self._known:
                part = of(each)
                if (each.generation, each.step) == (generation, step) and part is not None:
                    part.is_whole = True
                    return True
            return False

    def note_everywhere(self, generation: int, step: int) -> None:
        """All workers of the generation have their parts of a step's checkpoint: no older one is needed.

        Another rank may have heard of that earlier, and send a newer one already.
        """
        with self._lock:
            for each in self._known:
                each.is_everywhere = each.is_everywhere or (each.generation, each.step) == (generation, step)
            self._drop(lambda each: each.generation < generation or each.step < step)

    def keep_only(self, steps: Collection[int]) -> None:
        """Of what was made before this generation, the checkpoints of these steps alone are needed."""
        with self._lock:
            self._known = [each for each in self._known if each.step in steps]
            for each in self._known:
                each.is_everywhere = True
            self._free = self._free if self._known else {}

    def held(self) -> tuple[HeldCheckpoint, ...]:
        """What there is."""
        with self._lock:
            return tuple(
                HeldCheckpoint(
                    generation=each.generation,
                    step=each.step,
                    sections=tuple(sorted({layout.section for part in each.parts() for layout in part.layouts})),
                )
                for each in self._known
                if each.parts()
            )

    def states(self, step: int | None) -> dict[int, SectionState]:
        """By section, the state of a step, as references."""
        with self._lock:
            parts = [part for each in self._known if each.step == step for part in each.parts()]
        return {section: state for part in parts for section, state in part.states().items()}

    def loop(self, step: int) -> tuple[bool, JSON]:
        """Whether this worker made a checkpoint of a step, and the state of the training loop in it."""
        with self._lock:
            own = [each.loop for each in self._known if each.step == step and each.own is not None]
        return bool(own), own[0] if own else None

    def _of(self, generation: int, step: int) -> _Checkpoint:
        for each in self._known:
            if (each.generation, each.step) == (generation, step):
                return each
        self._known.append(_Checkpoint(generation, step))
        return self._known[-1]

    def _room(self, layouts: Sequence[SectionLayout], allocate: Callable[[int], Tensor], *, own: bool) -> Tensor | None:
        size_bytes, free = sum(layout.size_bytes for layout in layouts), self._free.pop(own, None)
        if free is not None and free.numel() == size_bytes:
            return free
        return allocate(size_bytes) if has_room(size_bytes) else None

    def _drop(self, is_over: Callable[[_Checkpoint], bool]) -> None:
        """Drop some. The memory of what was everywhere, which nobody reads or writes any more, is used again."""
        kept = []
        for each in self._known:
            if not is_over(each):
                kept.append(each)
            elif each.is_everywhere:
                self._free |= {part is each.own: part.memory for part in each.parts()}
        self._known = kept


class CheckpointCopies:
    """Makes the memory checkpoints of one rank in one generation, sends them to a keeper, and keeps another rank's."""

    def __init__(
        self,
        memory: MemoryCheckpoints,
        group: Group,
        *,
        generation: int,
        keeper: int | None,
        owner: int | None,
        ranks: int,
        states: Callable[[], Mapping[int, SectionState]],
        copies: HostCopies,
        every_s: Callable[[float], float],
        inbox: Inbox,
        rank: int,
        stage: int,
    ) -> None:
        """Start to send and to keep.

        Args:
            memory: of this worker.
            group: every member of the generation.
            generation: its number.
            keeper: rank that gets copies of this one's; None: nobody does.
            owner: rank whose copies come here, if any's do.
            ranks: of the grid.
            states: of this rank's sections, as references.
            copies: from the device that they are on.
            every_s: seconds between two of them, by those for which training stops to make one.
            inbox: of the generation, for its end.
            rank: this one.
            stage: that it runs.
        """
        self._memory, self._generation, self._ranks, self._inbox = memory, generation, ranks, inbox
        self._states, self._copies, self._pace = states, copies, every_s
        self._where = {"rank": rank, "stage": stage}
        self._changed = threading.Condition()
        self._made: Made | None = None  # the newest
        self._there: int | None = None  # the step of which the keeper has it
        self._everywhere, self._made_s, self._stall_s = True, float("-inf"), float("inf")
        self._warned = False
        if keeper is not None:
            line = wire.Line(group, keeper)
            start("checkpoint-sender", lambda: self._send_all(line))
        if owner is not None:
            kept = wire.Line(group, owner)
            start("checkpoint-keeper", lambda: self._keep_all(kept))

    # -- the training thread ---------------------------------------------------------------------------------

    def flags(self) -> dict[str, float]:
        """What this rank says in a vote; ``keep`` counts on rank 0."""
        with self._changed:
            is_there = self._made is not None and self._there == self._made.step
        return {"kept": float(is_there), "keep": float(self._due()) if self._where["rank"] == 0 else 0.0}

    def _due(self) -> int:
        since_s, every_s = time.monotonic() - self._made_s, self._every_s()
        return (since_s >= every_s) + (since_s >= _PATIENCE * every_s)

    def after(self, totals: StepTotals, next_step: int, loop: Callable[[], JSON]) -> Ready | None:
        """Do what a vote has decided, after its update; returns when the state may change again, if it is copied."""
        if self._made is not None and not self._everywhere and totals.kept == self._ranks:
            self._everywhere = True
            self._memory.note_everywhere(self._generation, self._made.step)
        if totals.keep < (1 if self._everywhere else 2):
            return None
        self._made_s, self._everywhere = time.monotonic(), False
        with span("keep", **self._where, step=next_step):
            made = self._make(next_step, loop())
        self._stall_s = min(self._stall_s, time.monotonic() - self._made_s)  # the first one makes room, too
        with self._changed:
            self._made = made  # if there is none, this rank says no more of the one before that it is there
            self._changed.notify_all()
        return None if made is None else made.copied

    def _make(self, step: int, loop: JSON) -> Made | None:
        rank = self._where["rank"]
        try:
            made = self._memory.make(self._generation, step, self._states(), self._copies, loop)
        except CheckpointError as error:
            self._warn_once(f"the state of rank {rank} has no copy in memory: {error}")
            return None
        if made is None:
            self._warn_once(f"rank {rank} has no room in memory for a checkpoint of its state")
        return made

    def close(self) -> None:
        """The generation is over: nothing is sent any more."""
        with self._changed:
            self._changed.notify_all()

    def _every_s(self) -> float:
        return self._pace(0.0 if self._made is None else self._stall_s)

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"{what}: the loss of a worker may send the run back to a saved state. If memory is short, use fewer "
                "workers per machine, or more machines."
            )

    # -- to the keeper ---------------------------------------------------------------------------------------

    def _send_all(self, line: wire.Line) -> None:
        sent = -1
        try:
            while (made := self._wait_beyond(sent)) is not None:
                sent = made.step
                made.copied.wait()
                self._memory.complete_own(self._generation, made.step)
                with span("send-kept", **self._where, step=made.step):
                    if self._send(line, made):
                        with self._changed:
                            self._there = made.step
        except wire.PeerLost:
            return
        except (CheckpointError, RuntimeError) as error:
            warn(f"the state of rank {self._where['rank']} has no copy on another worker: {error}")

    def _wait_beyond(self, step: int) -> Made | None:
        """The newest that was made after ``step``; None: the generation is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox.ended or (self._made is not None and self._made.step > step))
            return None if self._inbox.ended else self._made

    def _send(self, line: wire.Line, made: Made) -> bool:
        opening = wire.offer(
            line, wire.CopyKind.STATE, made.step, made.header, made.body.size_bytes, wire.SMALL_PART_BYTES
        )
        if opening is None:
            self._warn_once(
                f"rank {line.peer} has no room for a copy of rank {self._where['rank']}'s state of "
                f"{format_bytes(made.body.size_bytes)}"
            )
            return False
        parts, within_s = max(1, -(-made.body.size_bytes // opening.part_bytes)), self._every_s() / 2

        def fill(first: int, part: Tensor) -> bool:
            made.body.read(first, part)
            return self._made is made

        def pause(part_s: float) -> None:
            self._inbox.over.wait(checkpoint_pause_s(part_s, within_s / parts))

        return wire.send_parts(line, opening, fill, pause) and wire.await_answer(line)

    # -- from the owner --------------------------------------------------------------------------------------

    def _keep_all(self, line: wire.Line) -> None:
        try:
            while not self._inbox.ended:
                opening, header = wire.next_offer(line)
                body = self._memory.begin_others(self._generation, opening.step, from_bytes(header))
                wire.answer(line, yes=body is not None)
                if body is not None and wire.receive_parts(line, opening, body.write):
                    with span("kept", **self._where, step=opening.step):
                        is_there = self._memory.complete_others(self._generation, opening.step)
                    wire.answer(line, yes=is_there)
        except wire.PeerLost:
            return
