"""Sends copies of this rank's state, and of its sums of gradients, to the rank that keeps them, beside the training.

A state is sent as soon as a memory checkpoint has been made, unless other ranks hold it; then the sums of the step that
began with it, as long as that lasts, of one section after another, every few seconds.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.errors import VarunaError
from varuna.core.sums import HeldSums, IndexSet, SectionSum
from varuna.core.units import format_bytes
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import StateGate
from varuna.engine.base.transport import Group
from varuna.engine.copies import wire
from varuna.engine.copies.layout import Body
from varuna.engine.copies.memory_checkpoints import CheckpointMaker, Made
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.sums import SumWanted
from varuna.process.console import warn
from varuna.process.threads import start
from varuna.schedule.copy_pace import PROCESSOR_S_PER_BYTE, pause_s, state_pause_s, sums_pace, sums_pause_s


class CopiedStage(NamedTuple):
    """Parts of a stage that are copied."""

    still: StateGate
    """says when the state rests"""
    checkpoints: CheckpointMaker | None
    """of its state; None: other ranks hold it"""
    stage: Stage | None
    """the stage whose sums of gradients are copied, too; None: they are not"""


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
        self._line, self._copied, self._inbox = wire.CopyChannel(group, keeper), copied, inbox
        self._still, self._steps, self._where = copied.still, steps, {"rank": rank, "stage": stage}
        self._room = torch.empty(0)  # for the sums of any section
        self._step_s, self._round_s = 0.0, 0.0  # of the newest step, and of copies of all sums in it
        start("copy-sender", self._run)

    def _run(self) -> None:
        checkpoints, stage = self._copied.checkpoints, self._copied.stage
        try:
            if checkpoints is not None:
                self._send_states(checkpoints, stage)
            elif stage is not None:
                self._send_sums(stage)
        except wire.PeerLost:
            return
        except (VarunaError, RuntimeError) as error:
            warn(f"what rank {self._where['rank']} has is not copied to another worker any more: {error}")

    def _send_states(self, checkpoints: CheckpointMaker, stage: Stage | None) -> None:
        """Send the memory checkpoints, and after each the sums of the step that began with it."""
        step, begin_s = -1, 0.0
        checkpoints.make_first()
        while (made := checkpoints.wait_beyond(step)) is not None:
            if step >= 0:
                self._step_s = (made.made_s - begin_s) / (made.step - step)
            step, begin_s = made.step, made.made_s
            with span("send-kept", **self._where, step=step):
                is_there = self._send_state(made, checkpoints)
            # Sums without the state that their step began with would be of no use.
            if is_there:
                checkpoints.note_there(step)
                if stage is not None and step < self._steps:
                    self._copy_sums(step, stage, begin_s)

    def _send_sums(self, stage: Stage) -> None:
        """Send the sums of each step that lasts long enough."""
        step, begin_s = -1, time.monotonic()
        while (next_step := self._still.wait_beyond(step)) is not None and next_step < self._steps:
            now_s = time.monotonic()
            step, begin_s, self._step_s = next_step, now_s, now_s - begin_s
            self._copy_sums(step, stage, begin_s)

    # -- state -----------------------------------------------------------------------------------------------

    def _send_state(self, made: Made, checkpoints: CheckpointMaker) -> bool:
        """Return whether it has come to the keeper as a whole."""
        size_bytes = made.body.size_bytes
        opening = wire.offer_copy(
            self._line, wire.CopyKind.STATE, made.step, made.header, size_bytes, wire.SMALL_PART_BYTES
        )
        if opening is None:
            checkpoints.warn_once(
                f"rank {self._line.peer} has no room for a copy of rank {self._where['rank']}'s state of "
                f"{format_bytes(size_bytes)}"
            )
            return False

        begin_s, every_s = time.monotonic(), max(checkpoints.every_s, self._step_s)

        def fill(first: int, part: Tensor) -> bool:
            made.body.read(first, part)
            return checkpoints.is_newest(made)

        def pause(part_s: float) -> None:
            self._inbox.over.wait(state_pause_s(part_s, time.monotonic() - begin_s, every_s))

        return wire.send_parts(self._line, opening, fill, pause) and wire.await_answer(self._line)

    # -- sums of gradients -----------------------------------------------------------------------------------

    def _copy_sums(self, step: int, stage: Stage, step_begin_s: float) -> None:
        """Send the sums of all sections, again and again until the step is over or the keeper takes no more."""
        sizes, sent = stage.sums.sizes(), dict[int, IndexSet]()
        all_bytes = 4 * sum(sizes.values())
        # The first step of a generation may be the rest of one; what is predicted may be nominal.
        left_s = max(self._step_s, stage.plan.step_s) - (time.monotonic() - step_begin_s)
        pace = sums_pace(left_s, all_bytes, self._round_s or PROCESSOR_S_PER_BYTE * all_bytes)
        wait_s = 0.0 if stage.sums.goes_on else pace.every_s  # work of before, which a loss would take along as well
        while self._still.wait_while_in(step, wait_s):
            begin_s = time.monotonic()
            if not self._room.numel():
                self._room = stage.sums.room()
            for section, size in reversed(sizes.items()):  # as backwards come to them
                wanted = stage.sums.copy_section(
                    section, self._room[:size], lambda: self._still.wait_while_in(step, 0.0)
                )
                if wanted is None:
                    return
                if wanted.micro_batches and wanted.micro_batches != sent.get(section):
                    if not self._send_sum(step, stage, wanted):
                        return
                    sent[section] = wanted.micro_batches
            self._round_s = time.monotonic() - begin_s
            wait_s = sums_pause_s(pace, self._round_s)

    def _send_sum(self, step: int, stage: Stage, wanted: SumWanted) -> bool:
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
        opening = wire.offer_copy(self._line, wire.CopyKind.SUM, step, header, body.size_bytes)

        def fill(first: int, part: Tensor) -> bool:
            body.read(first, part)
            return self._still.wait_while_in(step, 0.0)

        def pause(part_s: float) -> None:
            self._still.wait_while_in(step, pause_s(part_s))

        if opening is None:
            return False
        with span("copy-sum", **self._where, step=step, index=wanted.section):
            return wire.send_parts(self._line, opening, fill, pause)
