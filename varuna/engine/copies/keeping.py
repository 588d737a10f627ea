"""Keeps another rank's memory checkpoints, and copies of its sums of gradients, in host memory."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.sums import HeldSums
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import StateGate
from varuna.engine.base.transport import Group
from varuna.engine.copies import wire
from varuna.engine.copies.layout import Body, from_bytes
from varuna.engine.copies.memory_checkpoints import MemoryCheckpoints, has_room
from varuna.process.threads import start


class CopiedSums(NamedTuple):
    """The sums of one section, as another rank has sent them."""

    held: HeldSums
    values: Tensor


class KeptSums:
    """Copies of another rank's sums, of one step. Once they are sealed, what arrives is dropped."""

    def __init__(self) -> None:
        """Begin without any."""
        self._lock = threading.Lock()
        self._sealed = False
        self._step: int | None = None
        self._sums: dict[int, CopiedSums] = {}  # by section
        self._spares: list[Tensor] = []  # memory of sums that were replaced, or are of a step that is over

    def begin(self, step: int, size_bytes: int) -> Tensor | None:
        """Make room for the sums of a section in ``step``; None: there is none. Those of steps before are dropped."""
        with self._lock:
            if self._sealed:
                return None
            if self._step != step:
                self._step = step
                self._spares += [each.values for each in self._sums.values()]
                self._sums = {}
            for index, spare in enumerate(self._spares):
                if spare.nbytes == size_bytes:
                    return self._spares.pop(index)
            return torch.empty(size_bytes // 4, dtype=torch.float32) if has_room(size_bytes) else None

    def complete(self, held: HeldSums, values: Tensor) -> None:
        """Take the sums of one section, which have come whole, in place of older ones."""
        [section] = (each.section for each in held.copies)
        with self._lock:
            if not self._sealed:
                if section in self._sums:
                    # Only now: until a newer copy is whole, the older one is what can be resumed from.
                    self._spares.append(self._sums[section].values)
                self._sums[section] = CopiedSums(held, values)

    def sealed(self, step: int | None) -> dict[int, CopiedSums]:
        """Return the sums of ``step``, by section; from now on nothing changes them."""
        with self._lock:
            self._sealed = True
            return dict(self._sums) if step is not None and self._step == step else {}


class CopyKeeper:
    """Receives the copies of rank ``owner``, as long as the generation lasts."""

    def __init__(
        self,
        group: Group,
        owner: int,
        memory: MemoryCheckpoints,
        sums: KeptSums,
        *,
        generation: int,
        inbox: Inbox,
        still: StateGate,
        rank: int,
        stage: int,
    ) -> None:
        """Start receiving.

        Args:
            group: every member of the generation.
            owner: rank that sends copies of what it has.
            memory: takes its states.
            sums: takes its sums.
            generation: its number.
            inbox: of the generation, for its end.
            still: says which step this rank's own state is of.
            rank: this one.
            stage: that it runs.
        """
        self._line, self._memory, self._sums, self._generation = (
            wire.CopyChannel(group, owner),
            memory,
            sums,
            generation,
        )
        self._inbox, self._still, self._where = inbox, still, {"rank": rank, "stage": stage}
        start("copy-keeper", self._run)

    def _run(self) -> None:
        try:
            while not self._inbox.ended:
                opening, header = wire.next_offer(self._line)
                if opening.kind == wire.CopyKind.STATE:
                    self._keep_state(opening, header)
                elif self._still.wait_beyond(opening.step - 1) is None:
                    return
                else:  # this rank has the vote before: what it keeps of that step is worth nothing any more
                    self._keep_sum(opening, HeldSums.model_validate_json(header))
        except wire.PeerLost:
            return

    def _keep_state(self, opening: wire.CopyHeader, header: bytes) -> None:
        body = self._memory.begin_others(self._generation, opening.step, from_bytes(header))
        wire.send_answer(self._line, yes=body is not None)
        if body is not None and wire.receive_parts(self._line, opening, body.write):
            with span("kept", **self._where, step=opening.step):
                is_there = self._memory.complete_others(self._generation, opening.step)
            wire.send_answer(self._line, yes=is_there)

    def _keep_sum(self, opening: wire.CopyHeader, held: HeldSums) -> None:
        values = self._sums.begin(opening.step, opening.body_bytes)
        wire.send_answer(self._line, yes=values is not None)
        if values is None:
            return
        body = Body.of_memory([values.view(torch.uint8)])
        if wire.receive_parts(self._line, opening, body.write):
            with span("kept-sum", **self._where, step=opening.step, index=held.copies[0].section):
                self._sums.complete(held, values)
