"""Sends a copy of this rank's state to the rank that keeps it, once a step, beside the training.

For each copy:

1. sender: the step, and the sizes of header, body and parts
2. sender: the header
3. keeper: whether it has room; it answers once it is at that step itself, since its last copy is worth something until
   then
4. sender: the parts, each with a word that says whether the state still rests
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import CheckpointError
from varuna.core.units import format_bytes
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import Still
from varuna.engine.base.transport import Group
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes
from varuna.engine.copies.pace import CopyPace, pause_s
from varuna.process.console import warn
from varuna.process.threads import start

TAG = 90_000
ANSWER_TAG = TAG + 1
PART_BYTES = 4 * 2**20
WORD_BYTES = 8
"""After each part: 1 if it is one."""


class Opening(NamedTuple):
    """What a copy begins with."""

    step: int
    header_bytes: int
    body_bytes: int
    part_bytes: int


class _Frozen(NamedTuple):
    """What is to be sent of a step's state."""

    header: bytes
    body: Body


class CopySender:
    """Sends copies of a stage's state to ``keeper``, as long as the generation lasts."""

    def __init__(
        self,
        group: Group,
        keeper: int,
        *,
        inbox: Inbox,
        still: Still,
        states: Callable[[], Mapping[int, SectionState]],
        steps: int,
        rank: int,
        stage: int,
    ) -> None:
        """Start sending.

        Args:
            group: every member of the generation.
            keeper: rank that keeps the copy.
            inbox: of the generation, for its end.
            still: says when the state rests.
            states: of all sections of the stage, as references.
            steps: length of the run: nothing follows its last one.
            rank: this one.
            stage: that it runs.
        """
        self._group, self._keeper, self._inbox, self._still = group, keeper, inbox, still
        self._states, self._steps, self._where = states, steps, {"rank": rank, "stage": stage}
        self._pace, self._has_room = CopyPace(), True
        start("copy-sender", self._run)

    def _run(self) -> None:
        step, begin_s, copy_s, tried = -1, 0.0, None, False
        while (next_step := self._still.wait_beyond(step)) is not None and next_step < self._steps:
            now_s = time.monotonic()
            if tried and self._pace.ended(copy_s, now_s - begin_s) and self._has_room:
                warn(
                    f"copies of rank {self._where['rank']}'s state on rank {self._keeper} take more than a third of a "
                    "step: they are made less often, and the loss of a worker may send the run back to a saved state"
                )
            step, begin_s, tried = next_step, now_s, self._pace.begins()
            try:
                copy_s = self._copy(step) if tried else None
            except RuntimeError:
                return  # the other rank is gone: whoever decides on the generation learns that from its other links
            except CheckpointError as error:
                warn(f"the state of rank {self._where['rank']} has no copy on another worker: {error}")
                return

    def _copy(self, step: int) -> float | None:
        """Seconds until the copy was complete; None: the state changed before, or the keeper has no room."""
        begin_s = time.monotonic()
        frozen = self._still.read(step, self._frozen)
        if frozen is None:
            return None
        header, body = frozen
        part_bytes = min(PART_BYTES, max(WORD_BYTES, body.size_bytes))
        opening = Opening(step, len(header), body.size_bytes, part_bytes)
        self._send(torch.tensor(opening, dtype=torch.int64))
        self._send(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        answer = self._group.receive(torch.zeros(1, dtype=torch.int64), self._keeper, ANSWER_TAG).wait()
        self._has_room = bool(answer.item())
        if not self._has_room:
            self._warn_once_of_room(body.size_bytes)
            return None
        buffer = torch.zeros(part_bytes + WORD_BYTES, dtype=torch.uint8)
        part, word = buffer[:part_bytes], buffer[part_bytes:].view(torch.int64)
        with span("copy", **self._where, step=step):
            for first in range(0, max(1, body.size_bytes), part_bytes):
                rests = self._still.read(step, partial(_look, body, first, part)) is not None
                word.fill_(rests)
                part_s = self._send(buffer)
                if not rests:
                    return None
                self._inbox.over.wait(pause_s(part_s))
        return time.monotonic() - begin_s

    def _frozen(self) -> _Frozen:
        """Where the state is that rests now."""
        states = self._states()
        layouts = [SectionLayout.of(states[section]) for section in sorted(states)]
        return _Frozen(as_bytes(layouts), Body.of_states(layouts, states))

    def _send(self, message: Tensor) -> float:
        """Send a message; how long it took."""
        begin_s = time.monotonic()
        self._group.send(message, self._keeper, TAG).wait()
        return time.monotonic() - begin_s

    def _warn_once_of_room(self, size_bytes: int) -> None:
        if not self._pace.late:
            warn(
                f"rank {self._keeper} has no room for a copy of rank {self._where['rank']}'s state of "
                f"{format_bytes(size_bytes)}: the loss of a worker may send the run back to a saved state. "
                "Use fewer workers per machine, or more machines."
            )


def _look(body: Body, first: int, part: Tensor) -> bool:
    body.read(first, part)
    return True
