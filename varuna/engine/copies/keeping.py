"""Keeps copies of another rank's state, and of its sums of gradients, in host memory for the next generation."""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.sums import HeldSums
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import StateGate
from varuna.engine.base.transport import Group
from varuna.engine.copies import wire
from varuna.engine.copies.layout import Body, SectionLayout, from_bytes
from varuna.process.host_memory import available_bytes
from varuna.process.threads import start

_ROOM = 2
"""So many times as much as a copy takes must be free, since others ask too."""


class CopiedSums(NamedTuple):
    """The sums of one section, as another rank has sent them."""

    held: HeldSums
    values: Tensor


class RecoverableStep(NamedTuple):
    """The state of a step, and all that its update reads beside the vote."""

    step: int
    states: dict[int, SectionState]
    """by section, without files' frozen parameters"""
    sums: dict[int, CopiedSums]
    """by section with gradients"""
    totals: dict[str, Tensor]
    """of tied gradients, by parameter"""


class KeptCopy:
    """Copies of another rank's state and sums, or of its sums alone. Once it is sealed, what arrives is dropped.

    If the sums of a step are all there when the copy of the next state begins, both are kept, with the state that they
    are on top of, until that copy is complete: there is no other until then.
    """

    def __init__(self, owner: int | None = None) -> None:
        """``owner``: rank whose copies they will be; None: nobody's."""
        self.owner = owner
        self._lock = threading.Lock()
        self._sealed = False
        self._step: int | None = None
        self._memories: dict[int, Tensor] = {}  # by section
        self._layouts: Sequence[SectionLayout] = ()
        self._sums: dict[int, CopiedSums] = {}  # by section
        self._totals: dict[str, Tensor] | None = None  # once the sums are those of a whole step
        self._before: tuple[RecoverableStep, dict[int, Tensor]] | None = None  # and the memory of its states
        self._free: dict[int, Tensor] = {}  # memory of states, by section
        self._spares: list[Tensor] = []  # memory of sums that were replaced, or are of a step that is over

    def begin(self, step: int, layouts: Sequence[SectionLayout]) -> Body | None:
        """Room for a step's state, or None if there is none; what cannot help any more is dropped."""
        with self._lock:
            if self._sealed:
                return None
            sizes = {layout.section: layout.size_bytes for layout in layouts}
            self._put_aside(step)
            self._step, self._layouts = None, ()
            if not self._take_room(sizes):
                self._drop_before()
                if not self._take_room(sizes):
                    self._memories, self._free = {}, {}
                    return None
            return Body.of_memory([self._memories[layout.section] for layout in layouts])

    def _put_aside(self, step: int) -> None:
        """Keep the state before that of ``step``, if its update can be made again; else its memory may be used."""
        self._drop_before()
        if self._totals is not None and self._step == step - 1:
            self._before = self._whole(self._totals), self._memories
            self._sums = {}
        else:
            self._free |= self._memories
            self._drop_sums()
        self._memories, self._totals = {}, None

    def _whole(self, totals: dict[str, Tensor]) -> RecoverableStep:
        assert self._step is not None
        return RecoverableStep(self._step, self._states(), self._sums, totals)

    def _states(self) -> dict[int, SectionState]:
        return {layout.section: layout.state_in(self._memories[layout.section]) for layout in self._layouts}

    def _take_room(self, sizes: Mapping[int, int]) -> bool:
        """Memory for states of these sizes, by section: what is free, and new."""
        used = {section: each for section, each in self._free.items() if sizes.get(section) == each.numel()}
        self._free = {}
        if not has_room(sum(size for section, size in sizes.items() if section not in used)):
            return False
        self._memories = {
            section: used[section] if section in used else torch.empty(size, dtype=torch.uint8)
            for section, size in sizes.items()
        }
        return True

    def _drop_before(self) -> None:
        """There is a newer one, or one is needed more; its memory is used again."""
        if self._before is not None:
            (whole, self._free), self._before = self._before, None
            self._spares += [each.values for each in whole.sums.values()]

    def complete(self, step: int, layouts: Sequence[SectionLayout]) -> None:
        """All of it is there."""
        with self._lock:
            if not self._sealed:
                self._step, self._layouts = step, layouts
                self._drop_before()

    def turn_to(self, step: int) -> None:
        """Only sums come, and from now on those of ``step``: what is there of another one is worth nothing."""
        with self._lock:
            if not self._sealed and self._step != step:
                self._step = step
                self._drop_sums()

    def _drop_sums(self) -> None:
        self._totals = None
        self._spares += [each.values for each in self._sums.values()]
        self._sums = {}

    def begin_sum(self, step: int, size_bytes: int) -> Tensor | None:
        """Room for the sums of a section in ``step``; None if there is none, or no state that they belong to."""
        with self._lock:
            if self._sealed or self._step != step:
                return None
            for index, spare in enumerate(self._spares):
                if spare.nbytes == size_bytes:
                    return self._spares.pop(index)
            return torch.empty(size_bytes // 4, dtype=torch.float32) if has_room(size_bytes) else None

    def complete_sum(self, step: int, held: HeldSums, values: Tensor) -> None:
        """The sums of one section are there, in place of older ones."""
        [section] = (each.section for each in held.copies)
        with self._lock:
            if not self._sealed and self._step == step:
                if section in self._sums:
                    self._spares.append(self._sums[section].values)
                self._sums[section] = CopiedSums(held, values)

    def complete_step(self, step: int, totals: dict[str, Tensor]) -> None:
        """The sums that are there are those of the whole ``step``, with these totals."""
        with self._lock:
            if not self._sealed and self._step == step:
                self._totals = totals

    def seal(self, step: int | None) -> dict[int, SectionState]:
        """Let nothing change it any more; by section, the states that it has of ``step``, as references."""
        with self._lock:
            self._sealed = True
            return self._states() if step is not None and self._step == step else {}

    def update_left(self, step: int | None) -> RecoverableStep | None:
        """What makes the states of ``step`` once the update before it is made again; None: nothing, or they are there.

        Once it is sealed.
        """
        with self._lock:
            if step is None or self._step == step:
                return None
            newest = None if self._before is None else self._before[0]
            if self._step is not None and self._totals is not None:
                newest = self._whole(self._totals)
            return newest if newest is not None and newest.step == step - 1 else None

    def sums(self, step: int | None) -> dict[int, CopiedSums]:
        """By section, the sums that it has of ``step``, once it is sealed."""
        with self._lock:
            return dict(self._sums) if step is not None and self._step == step else {}


def has_room(size_bytes: int) -> bool:
    """Whether host memory has room for so much, and as much again."""
    free_bytes = available_bytes()
    return free_bytes is None or _ROOM * size_bytes <= free_bytes


class CopyKeeper:
    """Receives the copies of rank ``owner``, as long as the generation lasts."""

    def __init__(
        self,
        group: Group,
        owner: int,
        copy: KeptCopy,
        *,
        sums_alone: bool,
        inbox: Inbox,
        still: StateGate,
        rank: int,
        stage: int,
    ) -> None:
        """Start receiving.

        Args:
            group: every member of the generation.
            owner: rank that sends copies of what it has.
            copy: takes them.
            sums_alone: no state comes before its sums.
            inbox: of the generation, for its end.
            still: says which step this rank's own state is of.
            rank: this one.
            stage: that it runs.
        """
        self._line, self._copy, self._inbox, self._still = wire.Line(group, owner), copy, inbox, still
        self._sums_alone, self._where = sums_alone, {"rank": rank, "stage": stage}
        start("copy-keeper", self._run)

    def _run(self) -> None:
        try:
            while not self._inbox.ended:
                opening, header = wire.next_offer(self._line)
                # Until this rank has the step's vote itself, its copy may be all that is left of the one before.
                if self._still.wait_beyond(opening.step - 1) is None:
                    return
                if opening.kind == wire.CopyKind.SUM:
                    self._keep_sum(opening, HeldSums.model_validate_json(header))
                elif opening.kind == wire.CopyKind.LAST:
                    self._keep_last(opening, from_bytes(header))
                else:
                    self._keep_state(opening, from_bytes(header))
        except wire.PeerLost:
            return

    def _keep_state(self, opening: wire.CopyHeader, layouts: Sequence[SectionLayout]) -> None:
        body = self._copy.begin(opening.step, layouts)
        wire.answer(self._line, yes=body is not None)
        if body is not None and wire.receive_parts(self._line, opening, body.write):
            with span("kept", **self._where, step=opening.step):
                self._copy.complete(opening.step, layouts)

    def _keep_last(self, opening: wire.CopyHeader, layouts: Sequence[SectionLayout]) -> None:
        memories = [torch.empty(layout.size_bytes, dtype=torch.uint8) for layout in layouts]
        wire.answer(self._line, yes=True)
        if wire.receive_parts(self._line, opening, Body.of_memory(memories).write):
            totals = dict[str, Tensor]()
            for layout, memory in zip(layouts, memories, strict=True):
                totals |= layout.state_in(memory).tensors
            with span("kept-last", **self._where, step=opening.step):
                self._copy.complete_step(opening.step, totals)
            wire.answer(self._line, yes=True)

    def _keep_sum(self, opening: wire.CopyHeader, held: HeldSums) -> None:
        if self._sums_alone:
            self._copy.turn_to(opening.step)
        values = self._copy.begin_sum(opening.step, opening.body_bytes)
        wire.answer(self._line, yes=values is not None)
        if values is None:
            return
        body = Body.of_memory([values.view(torch.uint8)])
        if wire.receive_parts(self._line, opening, body.write):
            with span("kept-sum", **self._where, step=opening.step, index=held.copies[0].section):
                self._copy.complete_sum(opening.step, held, values)
