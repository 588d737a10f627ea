"""Memory checkpoints: the state of every few steps, in the memory of the worker that made it and of another one.

    step    s          s+1   ...                       s+j
    vote    keep                                       kept by all
            all copy   each sends its copy to its      those of
            their      keeper, beside the training     before s
            state      ----------------------------->  are dropped

The first is of the state that a generation begins with. Rank 0 says in a vote after which step the next one is made,
and each rank in every vote whether its keeper has its newest. If a worker is lost, all go back to the newest step of
which those that are left have all state. In long steps that is the one in flight, so nothing is undone.
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
from varuna.core.vote import StepTotals
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import StateGate
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes
from varuna.engine.device.host_copies import HostCopies, Ready
from varuna.process.console import warn
from varuna.process.host_memory import available_bytes

_PATIENCE = 10
"""Usual intervals after which a next one is made, though the newest has not come to all keepers."""
_ROOM = 2
"""Times of what a copy takes that must be free, since others ask, too."""


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
    made_s: float


class MemoryCheckpoints:
    """A worker's parts of memory checkpoints: its own stage's state, and that of the stage whose copies it keeps.

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
            # The newest that is everywhere stays until this one is: at any time one step can be gone back to.
            self._drop(lambda each: each.generation == generation and not each.is_everywhere and each.step != step)
            memory = self._room(layouts, copies.arena, own=True)
            if memory is None:
                return None
            made_s, checkpoint = time.monotonic(), self._of(generation, step)
            checkpoint.own, checkpoint.loop = _Part(layouts, memory, is_whole=False), loop
        copied = Body.of_states(layouts, states).begin_copy(memory, copies)
        return Made(step, as_bytes(layouts), Body.of_memory([memory]), copied, made_s)

    def complete_own(self, generation: int, step: int) -> bool:
        """Note that the copy of what was made has left the device; return False if it is not needed any more."""
        return self._complete(generation, step, lambda each: each.own)

    def begin_others(self, generation: int, step: int, layouts: Sequence[SectionLayout]) -> Body | None:
        """Make room for another worker's part; None if there is none."""
        with self._lock:
            memory = self._room(layouts, lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8), own=False)
            if memory is None:
                return None
            self._of(generation, step).others = _Part(layouts, memory, is_whole=False)
            return Body.of_memory([memory])

    def complete_others(self, generation: int, step: int) -> bool:
        """Note that all of another worker's part has come; return False if it is not needed any more."""
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
        """Note that all workers of the generation have their parts of a step's checkpoint: no older one is needed.

        Another rank may have heard of that earlier, and send a newer one already.
        """
        with self._lock:
            for each in self._known:
                each.is_everywhere = each.is_everywhere or (each.generation, each.step) == (generation, step)
            # By generation first: after a loss the same step may be made again, by other ranks and sections.
            self._drop(lambda each: each.generation < generation or each.step < step)

    def keep_only(self, steps: Collection[int]) -> None:
        """Keep, of what was made before this generation, these steps alone, and each section once."""
        found, kept = set[tuple[int, int]](), []
        with self._lock:
            # Newest first: of several of one step, the last attempt is kept.
            for each in reversed(self._known if steps else ()):  # a step that is broken off again and again has many
                there = {(each.step, layout.section) for part in each.parts() for layout in part.layouts}
                if each.step in steps and not found.issuperset(there):
                    found |= there
                    each.is_everywhere = True
                    kept.append(each)
            self._known = kept[::-1]
            self._free = self._free if kept else {}

    def held(self) -> tuple[HeldCheckpoint, ...]:
        """Return what this worker has of each memory checkpoint."""
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
        """Return the state of a step, by section, as references."""
        with self._lock:
            parts = [part for each in self._known if each.step == step for part in each.parts()]
        return {section: state for part in parts for section, state in part.states().items()}

    def loop(self, step: int) -> tuple[bool, JSON]:
        """Return whether this worker made a checkpoint of a step, and the state of the training loop in it."""
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
        """Drop some. The memory of what was everywhere, which no thread reads or writes any more, is used again."""
        kept = []
        for each in self._known:
            if not is_over(each):
                kept.append(each)
            elif each.is_everywhere:
                self._free |= {part is each.own: part.memory for part in each.parts()}
        self._known = kept


def has_room(size_bytes: int) -> bool:
    """Return whether host memory has room for ``size_bytes``, and as much again."""
    free_bytes = available_bytes()
    return free_bytes is None or _ROOM * size_bytes <= free_bytes


class CheckpointMaker:
    """Makes the memory checkpoints of one rank in one generation, and says in votes what has become of them."""

    def __init__(
        self,
        memory: MemoryCheckpoints,
        *,
        generation: int,
        ranks: int,
        first_step: int,
        states: Callable[[], Mapping[int, SectionState]],
        still: StateGate,
        copies: HostCopies,
        delay: Callable[[Ready], None],
        every_s: Callable[[float], float],
        inbox: Inbox,
        rank: int,
        stage: int,
    ) -> None:
        """Begin without any.

        Args:
            memory: of this worker.
            generation: its number.
            ranks: of the grid.
            first_step: of the generation.
            states: of this rank's sections, as references.
            still: says when they rest.
            copies: from the device that they are on.
            delay: lets the next update wait for something.
            every_s: seconds between two of them, by those for which training stops to make one.
            inbox: of the generation, for its end.
            rank: this one.
            stage: that it runs.
        """
        self._memory, self._generation, self._ranks, self._inbox = memory, generation, ranks, inbox
        self._first_step, self._states, self._still, self._copies = first_step, states, still, copies
        self._delay, self._pace = delay, every_s
        self._where = {"rank": rank, "stage": stage}
        self._changed = threading.Condition()
        self._has_begun = False
        self._loop: Callable[[], JSON] | None = None  # until the first is made
        self._made: Made | None = None  # the newest
        self._there: int | None = None  # the step of which the keeper has it
        self._everywhere, self._made_s, self._stall_s = False, time.monotonic(), float("inf")
        self._warned = False

    # -- the training thread ---------------------------------------------------------------------------------

    def begin_first_step(self, loop: Callable[[], JSON]) -> None:
        """Note that the generation's first step begins; ``loop`` gives the training loop's state, as it now stays."""
        with self._changed:
            self._has_begun, self._loop = True, loop
            self._changed.notify_all()

    def flags(self) -> dict[str, float]:
        """Return what this rank says in a vote; ``keep`` counts on rank 0."""
        self._still.read(self._first_step, self._make_first)  # the vote does not wait for the other thread
        with self._changed:
            is_there = self._made is not None and self._there == self._made.step
        return {"kept": float(is_there), "keep": float(self._due()) if self._where["rank"] == 0 else 0.0}

    def _due(self) -> int:
        since_s, every_s = time.monotonic() - self._made_s, self.every_s
        # 1: if the newest is everywhere; 2: whatever became of it (``follow_vote``, core.vote).
        return (since_s >= every_s) + (since_s >= _PATIENCE * every_s)

    def follow_vote(self, totals: StepTotals, next_step: int, loop: Callable[[], JSON]) -> None:
        """Do what a vote has decided, after its update."""
        # All ranks read the same vote, so all drop the older one, and make the next one, after the same step.
        if self._made is not None and not self._everywhere and totals.kept == self._ranks:
            self._everywhere = True
            self._memory.note_everywhere(self._generation, self._made.step)
        if totals.keep >= (1 if self._everywhere else 2):
            self._everywhere = False
            self._make(next_step, loop())

    def _make(self, step: int, loop: JSON) -> None:
        self._made_s = time.monotonic()
        with span("keep", **self._where, step=step):
            made = self._try(step, loop)
        self._stall_s = min(self._stall_s, time.monotonic() - self._made_s)  # the first one makes room, too
        if made is not None:
            # Training continues at once; only the update that would change what is still being copied waits.
            self._delay(made.copied)
        with self._changed:
            self._made = made  # if there is none, this rank says no more of the one before that it is there
            self._changed.notify_all()

    def _try(self, step: int, loop: JSON) -> Made | None:
        rank = self._where["rank"]
        try:
            made = self._memory.make(self._generation, step, self._states(), self._copies, loop)
        except CheckpointError as error:
            self.warn_once(f"the state of rank {rank} has no copy in memory: {error}")
            return None
        if made is None:
            self.warn_once(f"rank {rank} has no room in memory for a checkpoint of its state")
        return made

    def close(self) -> None:
        """End waits: the generation is over, and nothing is made any more."""
        with self._changed:
            self._changed.notify_all()

    # -- who sends them --------------------------------------------------------------------------------------

    def make_first(self) -> None:
        """Copy the state that the generation began with, as soon as all of it is there; blocks until then."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox.ended or self._has_begun)
        self._still.wait_beyond(self._first_step - 1)
        self._still.read(self._first_step, self._make_first)

    def _make_first(self) -> None:
        with self._changed:
            if self._loop is not None:
                loop, self._loop = self._loop, None
                self._make(self._first_step, loop())

    def wait_beyond(self, step: int) -> Made | None:
        """Return the newest that was made after ``step``, once it has left the device; None: the generation is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox.ended or (self._made is not None and self._made.step > step))
            made = None if self._inbox.ended else self._made
        if made is not None:
            made.copied.wait()
            self._memory.complete_own(self._generation, made.step)
        return made

    def is_newest(self, made: Made) -> bool:
        """Return whether nothing was made since."""
        return self._made is made

    def note_there(self, step: int) -> None:
        """Note that the keeper has that of ``step``."""
        with self._changed:
            self._there = step

    @property
    def every_s(self) -> float:
        """Seconds between two of them."""
        return self._pace(0.0 if self._made is None else self._stall_s)

    def warn_once(self, what: str) -> None:
        """Say why there is none, and what that means."""
        if not self._warned:
            self._warned = True
            warn(
                f"{what}: the loss of a worker may send the run back to a saved state. If memory is short, use fewer "
                "workers per machine, or more machines."
            )
