"""Sends copies of this rank's state, and of its sums of gradients, to the rank that keeps them, beside the training.

A state is sent once a step, as soon as it rests, unless other ranks hold it; then the sums of the step, of one section
after another, every few seconds. In a long step the vote waits for the last of them, as its update reads them: with the
state before, that is as good as the state after it, whose copy takes longer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import CheckpointError
from varuna.core.sums import HeldSums, SectionSum, Spans
from varuna.core.units import format_bytes
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import StateGate
from varuna.engine.base.transport import Group
from varuna.engine.copies import wire
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes
from varuna.engine.device.host_copies import CPU_COPIES, HostCopies, Ready
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.sums import SumWanted
from varuna.process.console import warn
from varuna.process.threads import start
from varuna.schedule.copy_pace import (
    PROCESSOR_S_PER_BYTE,
    CopyPace,
    last_sums_s,
    pause_s,
    state_pause_s,
    sums_pace,
    sums_pause_s,
)

_SHORTEST_S = 1e-6
_LOOK_S = 0.05
_PATIENCE = 10
"""So many times what the last copies of sums may take: then the vote waits no longer."""

States = Callable[[], Mapping[int, SectionState]]


class CopiedStage(NamedTuple):
    """What is copied of a stage."""

    still: StateGate
    """says when the state rests"""
    states: States | None
    """of all its sections, as references; None: other ranks hold them"""
    stage: Stage | None
    """whose sums of gradients are copied, too; None: they are not"""
    copies: HostCopies = CPU_COPIES
    """of states"""
    step_s: float = 0.0
    """seconds of a step, as planned"""
    repeats: Callable[[], bool] = lambda: True
    """whether an update depends on nothing but state, sums and vote"""


class _Frozen(NamedTuple):
    """What is to be sent of a step's state."""

    header: bytes
    body: Body
    after: Ready
    """the device's end of the update that made it"""


class CopySender:
    """Sends copies to ``keeper``, as long as the generation lasts."""

    def __init__(
        self, group: Group, keeper: int, copied: CopiedStage, *, inbox: Inbox, steps: int, rank: int, stage: int
    ) -> None:
        """Start sending.

        Args:
            group: every member of the generation.
            keeper: rank that keeps the copies.
            copied: what they are of.
            inbox: of the generation, for its end.
            steps: length of the run: nothing follows its last one.
            rank: this one.
            stage: that it runs.
        """
        self._line, self._keeper, self._inbox, self._copied = wire.Line(group, keeper), keeper, inbox, copied
        self._still, self._steps, self._where = copied.still, steps, {"rank": rank, "stage": stage}
        self._pace, self._last_pace, self._has_room = CopyPace(), CopyPace(), True
        self._room = torch.empty(0)  # for the sums of any section
        self._step_s, self._round_s = 0.0, 0.0  # of the newest step, and of copies of all sums in it
        self._turns = threading.Condition()
        self._there: int | None = None  # the step whose state the keeper has
        self._begin_s = 0.0  # of that step
        self._link_bytes_per_s = 0.0  # as that state went
        self._last: int | None = None  # the step whose training thread waits for the last copies
        start("copy-sender", self._run)

    def _run(self) -> None:
        states, stage = self._copied.states, self._copied.stage
        if states is not None:
            self._send_both(states, stage)
        elif stage is not None:
            self._send_sums(stage)

    def _send_sums(self, stage: Stage) -> None:
        """Send the sums of each step that lasts long enough."""
        step, begin_s = -1, time.monotonic()
        while (next_step := self._still.wait_beyond(step)) is not None and next_step < self._steps:
            now_s = time.monotonic()
            step, begin_s, self._step_s = next_step, now_s, now_s - begin_s
            try:
                self._copy_sums(step, stage, begin_s)
            except wire.PeerLost:
                return
            except RuntimeError as error:
                warn(f"the sums of rank {self._where['rank']} have no copy on another worker: {error}")
                return

    def _send_both(self, states: States, stage: Stage | None) -> None:
        """Send the state of each step, and then its sums."""
        step, begin_s, copy_s, tried = -1, time.monotonic(), None, False
        while (next_step := self._still.wait_beyond(step)) is not None and next_step < self._steps:
            now_s = time.monotonic()
            if tried and self._pace.ended(copy_s, now_s - begin_s) and self._has_room:
                warn(
                    f"copies of rank {self._where['rank']}'s state on rank {self._keeper} take more than a tenth of a "
                    "step: they are made less often, and the loss of a worker may send the run back to a saved state"
                )
            self._step_s = now_s - begin_s if step >= 0 else self._copied.step_s
            step, begin_s, tried = next_step, now_s, self._pace.begins()
            try:
                copy_s = self._copy(step, states) if tried else None
                if copy_s is not None and stage is not None:
                    with self._turns:
                        self._there, self._begin_s = step, begin_s
                    self._copy_sums(step, stage, begin_s)
                    self._copy_last(step, stage)
            except wire.PeerLost:
                return
            except (CheckpointError, RuntimeError) as error:
                warn(f"the state of rank {self._where['rank']} has no copy on another worker: {error}")
                return
            finally:
                self._let_go()

    def last_s(self, step: int) -> float:
        """How long the vote on ``step`` should wait for the last copies of its sums, about; 0: not at all."""
        stage = self._copied.stage
        if stage is None or not self._copied.repeats():
            return 0.0
        with self._turns:
            if self._there != step:
                return 0.0
            size_bytes = 4 * sum(stage.sums.sizes().values())
            return last_sums_s(size_bytes, self._link_bytes_per_s, time.monotonic() - self._begin_s)

    def finish(self, step: int, wait_s: float) -> None:
        """Send the sums as the update of ``step`` will read them, and wait for that; it should take ``wait_s``.

        The training thread calls this once they are complete, and changes nothing before it returns.
        """
        stage = self._copied.stage
        assert stage is not None
        with self._turns:
            if self._there != step or not self._last_pace.begins():
                return
            self._last = step
            self._still.ends(step)
            stage.sums.release()
            begin_s = time.monotonic()
            while self._last is not None and not self._inbox.ended and time.monotonic() < begin_s + _PATIENCE * wait_s:
                self._turns.wait(_LOOK_S)
            taken_s = time.monotonic() - begin_s if self._last is None else None
            self._last = None  # from now on nothing is read
        if self._last_pace.ended(taken_s, begin_s - self._begin_s) and not self._inbox.ended:
            warn(
                f"the vote does not wait any more for the last copies of rank {self._where['rank']}'s sums on rank "
                f"{self._keeper} in each step, since they come too late: if it is lost just after an update, the run "
                "goes back to a saved state"
            )

    # -- state -----------------------------------------------------------------------------------------------

    def _copy(self, step: int, states: States) -> float | None:
        """Seconds until the copy was complete; None: the state changed before, or the keeper has no room."""
        begin_s = time.monotonic()
        copies = self._copied.copies
        frozen = self._still.read(step, lambda: _frozen(states(), copies))
        if frozen is None:
            return None
        header, body, after = frozen
        after.wait()  # before each part, which holds the next update up, is read
        opening = wire.offer(self._line, wire.CopyKind.STATE, step, header, body.size_bytes)
        self._has_room = opening is not None
        if opening is None:
            self._warn_once_of_room(body.size_bytes)
            return None

        def fill(first: int, part: Tensor) -> bool:
            return bool(self._still.read(step, lambda: _read(body, first, part, copies, after)))

        sent_s, left_bytes = 0.0, body.size_bytes

        def pause(part_s: float) -> None:
            nonlocal sent_s, left_bytes
            sent_s, left_bytes = sent_s + part_s, left_bytes - opening.part_bytes
            if left_bytes > 0:  # sums follow much later
                self._inbox.over.wait(state_pause_s(part_s, time.monotonic() - begin_s, self._step_s))

        with span("copy", **self._where, step=step):
            whole = wire.send_parts(self._line, opening, fill, pause, copies)
        if not whole:
            return None
        self._link_bytes_per_s = body.size_bytes / max(sent_s, _SHORTEST_S)
        return time.monotonic() - begin_s

    def _warn_once_of_room(self, size_bytes: int) -> None:
        if not self._pace.late:
            warn(
                f"rank {self._keeper} has no room for a copy of rank {self._where['rank']}'s state of "
                f"{format_bytes(size_bytes)}: the loss of a worker may send the run back to a saved state. "
                "Use fewer workers per machine, or more machines."
            )

    # -- sums of gradients -----------------------------------------------------------------------------------

    def _copy_sums(self, step: int, stage: Stage, step_begin_s: float) -> None:
        """Send the sums of all sections, again and again until the step is over or the keeper takes no more."""
        sizes, sent = stage.sums.sizes(), dict[int, Spans]()
        all_bytes = 4 * sum(sizes.values())
        # The first step of a generation may be the rest of one; what is predicted may be nominal.
        left_s = max(self._step_s, stage.plan.step_s) - (time.monotonic() - step_begin_s)
        pace = sums_pace(left_s, all_bytes, self._round_s or PROCESSOR_S_PER_BYTE * all_bytes)
        wait_s = 0.0 if stage.sums.goes_on else pace.every_s  # work of before, which a loss would take along as well
        while self._still.lasts(step, wait_s):
            begin_s, room = time.monotonic(), self._room_for(stage)
            for section, size in reversed(sizes.items()):  # as backwards come to them
                wanted = stage.sums.take(section, room[:size], lambda: self._still.lasts(step, 0.0))
                if wanted is None:
                    return
                if wanted.micro_batches and wanted.micro_batches != sent.get(section):
                    if not self._copy_sum(step, stage, wanted):
                        return
                    sent[section] = wanted.micro_batches
            self._round_s = time.monotonic() - begin_s
            wait_s = sums_pause_s(pace, self._round_s)

    def _room_for(self, stage: Stage) -> Tensor:
        if not self._room.numel():
            self._room = stage.sums.room()
        return self._room

    def _copy_sum(self, step: int, stage: Stage, wanted: SumWanted) -> bool:
        def goes_on() -> bool:
            return self._still.lasts(step, 0.0)

        def pause(part_s: float) -> None:
            self._still.lasts(step, pause_s(part_s))

        return self._send_sum(step, stage, wanted, goes_on, pause)

    def _send_sum(
        self,
        step: int,
        stage: Stage,
        wanted: SumWanted,
        goes_on: Callable[[], bool],
        pause: Callable[[float], object],
    ) -> bool:
        """Send the sums of a section, which are in their room; False if they did not arrive as a whole."""
        held = HeldSums(
            micro_batch=stage.plan.micro_batch,
            sections=(),
            copies=(SectionSum(section=wanted.section, micro_batches=wanted.micro_batches),),
            without=stage.sums.without,
            losses=stage.work.known,
        )
        body = Body.of_memory([wanted.room.view(torch.uint8)])
        header = held.model_dump_json().encode()
        opening = wire.offer(self._line, wire.CopyKind.SUM, step, header, body.size_bytes)

        def fill(first: int, part: Tensor) -> bool:
            body.read(first, part)
            return goes_on()

        if opening is None:
            return False
        with span("copy-sum", **self._where, step=step, index=wanted.section):
            return wire.send_parts(self._line, opening, fill, pause)

    # -- the last sums of a step -------------------------------------------------------------------------------

    def _copy_last(self, step: int, stage: Stage) -> None:
        """Send all sums once more, without pauses, and totals of tied gradients, while the training thread waits."""
        if not self._waits(step):
            return
        with span("copy-last", **self._where, step=step):
            room = self._room_for(stage)
            for section, size in stage.sums.sizes().items():
                with self._turns:  # the training thread goes on only between two sections
                    wanted = stage.sums.last(section, room[:size]) if self._last == step else None
                if wanted is None or not wanted.micro_batches:
                    return
                if not self._send_sum(step, stage, wanted, lambda: self._waits(step), lambda part_s: None):
                    return
            self._copy_totals(step, stage)

    def _copy_totals(self, step: int, stage: Stage) -> None:
        copies = self._copied.copies
        totals = {stage.sections[0]: SectionState(stage.sections[0], dict(stage.totals.apart))}
        header, body, after = _frozen(totals, copies)
        opening = wire.offer(self._line, wire.CopyKind.LAST, step, header, body.size_bytes)

        def fill(first: int, part: Tensor) -> bool:
            with self._turns:
                if self._last == step:
                    body.read(first, part, copies, after)
                return self._last == step

        if opening is not None and wire.send_parts(self._line, opening, fill, lambda part_s: None, copies):
            wire.await_answer(self._line)  # what has only left would be lost with this machine

    def _waits(self, step: int) -> bool:
        with self._turns:
            return self._last == step

    def _let_go(self) -> None:
        """The training thread waits for nothing any more."""
        with self._turns:
            self._there = self._last = None
            self._turns.notify_all()


def _frozen(states: Mapping[int, SectionState], copies: HostCopies) -> _Frozen:
    """Where the state is that rests now."""
    layouts = [SectionLayout.of(states[section]) for section in sorted(states)]
    return _Frozen(as_bytes(layouts), Body.of_states(layouts, states), copies.point())


def _read(body: Body, first: int, part: Tensor, copies: HostCopies, after: Ready) -> bool:
    body.read(first, part, copies, after)
    return True
