"""Keeps the copy of another rank's state in host memory, for the next generation."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.still import Still
from varuna.engine.base.transport import Group
from varuna.engine.copies.layout import Body, SectionLayout, from_bytes
from varuna.engine.copies.sending import ANSWER_TAG, TAG, WORD_BYTES, Opening
from varuna.process.host_memory import available_bytes
from varuna.process.threads import start

_ROOM = 2
"""So many times as much as a copy takes must be free, since others ask too."""


class KeptCopy:
    """A copy of another rank's state. Once it is sealed, what arrives for it is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sealed = False
        self._step: int | None = None
        self._memories: dict[int, Tensor] = {}  # by section
        self._layouts: Sequence[SectionLayout] = ()

    def begin(self, layouts: Sequence[SectionLayout]) -> Body | None:
        """Drop the old copy; room for a new one, or None if there is none."""
        with self._lock:
            if self._sealed:
                return None
            self._step, self._layouts = None, ()
            sizes = {layout.section: layout.size_bytes for layout in layouts}
            kept = {section: each for section, each in self._memories.items() if sizes.get(section) == each.numel()}
            self._memories = kept
            more_bytes = sum(size for section, size in sizes.items() if section not in kept)
            free_bytes = available_bytes()
            if free_bytes is not None and _ROOM * more_bytes > free_bytes:
                self._memories = {}
                return None
            for section, size in sizes.items():
                if section not in kept:
                    self._memories[section] = torch.empty(size, dtype=torch.uint8)
            return Body.of_memory([self._memories[layout.section] for layout in layouts])

    def complete(self, step: int, layouts: Sequence[SectionLayout]) -> None:
        """All of it is there."""
        with self._lock:
            if not self._sealed:
                self._step, self._layouts = step, layouts

    def seal(self, step: int | None) -> dict[int, SectionState]:
        """Let nothing change it any more; by section, the states that it has of ``step``, as references."""
        with self._lock:
            self._sealed = True
            if step is None or self._step != step:
                return {}
            return {layout.section: layout.state_in(self._memories[layout.section]) for layout in self._layouts}


class CopyKeeper:
    """Receives the copies of the state of rank ``source``, as long as the generation lasts."""

    def __init__(
        self, group: Group, source: int, copy: KeptCopy, *, inbox: Inbox, still: Still, rank: int, stage: int
    ) -> None:
        """Start receiving; the arguments are those of ``CopySender``."""
        self._group, self._source, self._copy, self._inbox, self._still = group, source, copy, inbox, still
        self._where = {"rank": rank, "stage": stage}
        start("copy-keeper", self._run)

    def _run(self) -> None:
        try:
            while not self._inbox.ended and self._keep_one():
                pass
        except RuntimeError:
            return  # see CopySender

    def _keep_one(self) -> bool:
        """Receive one copy; False: the generation is over."""
        opening = Opening(*self._receive(len(Opening._fields) * WORD_BYTES).view(torch.int64).tolist())
        layouts = from_bytes(self._receive(opening.header_bytes).numpy().tobytes())
        # Until this rank has the step's vote itself, the copy that it has may be all that is left of that state.
        if self._still.wait_beyond(opening.step - 1) is None:
            return False
        body = self._copy.begin(layouts)
        answer = torch.tensor([int(body is not None)], dtype=torch.int64)
        self._group.send(answer, self._source, ANSWER_TAG).wait()
        if body is None:
            return True
        for first in range(0, max(1, body.size_bytes), opening.part_bytes):
            message = self._receive(opening.part_bytes + WORD_BYTES)
            if not message[opening.part_bytes :].view(torch.int64).item():
                return True
            body.write(first, message[: opening.part_bytes])
        with span("kept", **self._where, step=opening.step):
            self._copy.complete(opening.step, layouts)
        return True

    def _receive(self, size_bytes: int) -> Tensor:
        return self._group.receive(torch.empty(size_bytes, dtype=torch.uint8), self._source, TAG).wait()
