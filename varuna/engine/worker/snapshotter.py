"""Saves of a rank, and their pace: its parts of sections, copied at the end of a step, written in the background."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch

from varuna.checkpoint.io.frozen import FrozenParameters
from varuna.checkpoint.io.section_state import JSON, SectionState
from varuna.checkpoint.io.snapshot import Copied, SectionPart, SnapshotBuffer, needed_bytes, parts_of
from varuna.checkpoint.io.writer import BackgroundWriter
from varuna.checkpoint.pieces import SMALLEST_PART_BYTES
from varuna.core.errors import CheckpointError, StoreError
from varuna.core.messages import Assignment
from varuna.core.plan import Plan
from varuna.core.saved import SavedShard, paying_every_s
from varuna.engine.device.host_copies import DONE, Ready
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.loop_state import LOOP
from varuna.process.console import warn
from varuna.store.base import Store
from varuna.store.retry import writer_id

FLUSH_BOUND_S = 600.0
"""Most seconds that the end of a run waits for the last checkpoint to be durable."""
_WRITES = 10
"""However often a state should be saved because of losses, writing it takes 1/10 of the time at most."""


class _Snapshot(NamedTuple):
    """The content of the buffer, and its generation."""

    assignment: Assignment
    step: int
    parts: list[Copied]
    copied: Ready


class Snapshotter:
    """Decides (on rank 0) when a checkpoint is due, and copies this rank's parts of it for the writer.

    At most one copy of the rank's state is held, whatever happens: what is due meanwhile is skipped.
    """

    def __init__(
        self,
        store: Store,
        every: int | timedelta | None,
        on_saved: Callable[[SavedShard], None],
        on_unsaved: Callable[[str], None] | None = None,
        *,
        alone_s: float | None = None,
        smallest_part_bytes: int = SMALLEST_PART_BYTES,
        left_out: FrozenParameters | None = None,
    ) -> None:
        """Begin without a snapshot.

        Args:
            store: gets the checkpoints.
            every: steps or time between them; None: they serve this run alone, and are made by ``alone_s`` only.
            on_saved: hears of every durable part.
            on_unsaved: hears of failures. Default: a warning.
            alone_s: time between checkpoints while every section is held once and no loss was seen, so that the first
                one costs little. Default: losses are no reason for more checkpoints than ``every`` says.
            smallest_part_bytes: of a section; smaller ones are not divided.
            left_out: what is not saved; None: everything is.
        """
        self.store = store
        self._every, self._warn, self._alone_s = every, on_unsaved or warn, alone_s
        self._stall_s = self._write_s = 0.0  # of the newest save
        self._sums_s, self._sums_write_s = float("-inf"), 0.0  # end of the newest save of sums, and how long it took
        self._losses_per_hour = 0.0
        self.is_rescue = every is None
        """Its checkpoints end with the run."""
        self._last_s = time.monotonic()
        self._asked, self._step_s = (-2, 0.0), 0.0  # newest step whose end was asked for, when, and how long one takes
        self.newest = (-1, -1)
        """generation of the newest save, and the steps that it contains"""
        self._smallest_bytes, self._left_out = smallest_part_bytes, left_out
        self._one = threading.Lock()  # of the training thread, and of one that saves during a step
        self._snapshot: _Snapshot | None = None
        self._copied: Ready = DONE  # of the newest snapshot
        self._buffer = SnapshotBuffer()
        self._on_saved = on_saved
        self._writer = BackgroundWriter(store, on_saved=self._saved, on_error=lambda error: self._warn(str(error)))

    def is_due(self, step: int, outliving: Plan | None = None) -> bool:
        """Return whether the state after ``step`` should be saved: asked on rank 0 before it runs, told by the vote.

        The end of a step that is nearest to the due moment is taken. ``outliving``: the plan of a run that outlives the
        loss of workers.
        """
        if isinstance(self._every, int):
            return (step + 1) % self._every == 0
        every_s = self._every_s(outliving)
        now_s, (asked_step, asked_s) = time.monotonic(), self._asked
        if step != asked_step:
            self._step_s = now_s - asked_s if step == asked_step + 1 else 0.0
            self._asked = step, now_s
        # ``step`` ends one step from now; half a step more, and the end that is nearest to the due moment is taken.
        return now_s + 1.5 * self._step_s - self._last_s >= every_s

    def _every_s(self, outliving: Plan | None) -> float:
        if isinstance(self._every, int):
            return float("inf")
        every_s = float("inf") if self._every is None else self._every.total_seconds()
        return min(every_s, self._paying_s(outliving)) if outliving else every_s

    @property
    def is_saving(self) -> bool:
        """Whether the newest save is still being written."""
        return self._writer.is_saving

    def sums_due_s(self, outliving: Plan | None = None) -> float:
        """Return the seconds until sums of the step in progress should be saved; any thread may ask."""
        every_s = max(self._every_s(outliving), _WRITES * self._sums_write_s)
        return max(self._last_s, self._sums_s) + every_s - time.monotonic()

    def saved_sums(self, write_s: float) -> None:
        """Note that sums were saved just now, which took ``write_s``."""
        self._sums_s, self._sums_write_s = time.monotonic(), write_s

    def unsaved(self, reason: str) -> None:
        """Say that something was not saved."""
        self._warn(reason)

    def _paying_s(self, plan: Plan) -> float:
        if self._alone_s is None or self._writer.is_saving or (self.is_rescue and plan.holders > 1):
            return float("inf")
        every_s = paying_every_s(self._stall_s, self._losses_per_hour, plan, self._alone_s)
        return max(every_s, _WRITES * self._write_s)

    def inherit(self, assignment: Assignment) -> None:
        """Write, in the background, what lost ranks of the last generation have not; a spare too may have copied it.

        Only who lives through a morph has something to write for others.
        """
        with self._one:
            if self._snapshot is not None:
                forsaken = _forsaken(self._snapshot, assignment.lost_replicas)
                if forsaken:
                    self._writer.submit(self._snapshot.step, forsaken, self._snapshot.copied.wait)
            self._snapshot = None

    def begin(self, stage: Stage, assignment: Assignment) -> None:
        """Begin a generation with a seat, after ``inherit``: make room for its snapshots, in the background."""
        self._asked = -2, 0.0  # a morph is not a step
        self._losses_per_hour = assignment.losses_per_hour
        stage.copied = self._copied  # it has taken over storages that may still be copied
        expected = {section: self._kept(_expected_state(stage, section)) for section in stage.sharding.held}
        size_bytes = needed_bytes(self._parts(stage, assignment, expected))
        room = stage.job.traffic.saves.arena
        self._writer.do(lambda: self._buffer.reserve(size_bytes, room))

    def save(self, stage: Stage, assignment: Assignment, loop: Callable[[], JSON] = lambda: None) -> None:
        """Copy the parts that fall to this replica; skipped if the last save is still being written.

        ``loop`` is asked for the state of the training loop where section 0 is. The training thread calls this between
        steps, or another one during a step, in which nothing changes the state.
        """
        with self._one:
            self._save(stage, assignment, loop)

    def _save(self, stage: Stage, assignment: Assignment, loop: Callable[[], JSON]) -> None:
        self._last_s = time.monotonic()
        if self._writer.is_saving:
            self._warn(
                f"the checkpoint of step {stage.next_step} is skipped, because the previous one is still being written"
            )
            return
        self.newest = assignment.generation, stage.next_step
        self.flush()  # memory for it may still be made ready
        states = {section: self._kept(stage.state_of(section, owned_only=True)) for section in stage.sharding.held}
        if 0 in states and (said := loop()) is not None:
            states[0].scalars[LOOP] = said
        planned = self._parts(stage, assignment, states)
        copies = stage.job.traffic.saves
        parts, pairs = self._buffer.place(planned, states, copies.arena)
        self._copied = stage.copied = copied = copies.copy_to_host(pairs)
        self._snapshot = _Snapshot(assignment, stage.next_step, parts, copied)
        # All parts are copied, not only this replica's: a survivor writes those of a lost one (``inherit``).
        mine = [copied for copied in parts if copied.part.writer == stage.sharding.replica]
        self._stall_s = time.monotonic() - self._last_s
        if mine:
            self._writer.submit(stage.next_step, mine, copied.wait)

    def _saved(self, shard: SavedShard) -> None:
        self._write_s = time.monotonic() - self._last_s
        self._on_saved(shard)

    def flush(self) -> None:
        """Wait for the last save; say so if it does not end."""
        if not self._writer.flush(FLUSH_BOUND_S):
            self._warn(
                f"the last checkpoint was still being written after {FLUSH_BOUND_S:.0f} s; the previous one stays valid"
            )

    def close(self) -> None:
        """Let the writer finish what it can in a moment: the process ends."""
        self._writer.close()

    def _kept(self, state: SectionState) -> SectionState:
        return state if self._left_out is None else self._left_out.of(state)

    def _parts(self, stage: Stage, assignment: Assignment, states: Mapping[int, SectionState]) -> list[SectionPart]:
        return parts_of(
            list(states.values()),
            replica=stage.sharding.replica,
            holders={section: stage.sharding.holders[section] for section in states},
            generation=assignment.generation,
            smallest_bytes=self._smallest_bytes,
        )


def check_writable(store: Store) -> None:
    """Check now, not at the first save, that the store can be written.

    Raises:
        CheckpointError: nothing can be written there.
    """
    probe = f"probe-{writer_id()}"
    try:
        store.put(probe, b"")
        store.remove(probe)
    except StoreError as error:
        raise CheckpointError(str(error).replace(f"/{probe}", "")) from error


def _forsaken(snapshot: _Snapshot, lost_replicas: Collection[int]) -> list[Copied]:
    """Return parts in this rank's buffer whose writer is gone, and which fall to this rank."""
    return [copied for copied in snapshot.parts if copied.part.writer in lost_replicas]


def _expected_state(stage: Stage, section: int) -> SectionState:
    """Return the section's state as it will be saved; before the first step, the size of optimizer state is guessed."""
    state, job = stage.state_of(section, owned_only=True), stage.job
    names = job.model.trainable.intersection(job.model.sections[section].parameters)
    trained_bytes = {f"parameters/{name}": stage.parameters[name].nbytes for name in names}
    all_bytes = sum(trained_bytes.values())
    own_bytes = sum(size for name, size in trained_bytes.items() if name in state.tensors)  # another may own tied ones
    coming_bytes = job.model.facts.sections[section].optimizer_bytes
    if job.dtype is not torch.float32:  # the facts count the fp32 parameters, which are in the state already
        coming_bytes -= all_bytes
    guess_bytes = coming_bytes * own_bytes // max(1, all_bytes)
    if guess_bytes and not any(name.startswith("optimizer/") for name in state.tensors):
        state.tensors["optimizer/"] = torch.empty(guess_bytes, dtype=torch.uint8, device="meta")
    return state
