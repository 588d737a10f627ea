"""Optimizer state that follows its section into another rank, while that runs the first step of a generation.

Only an update needs it, so a section computes as soon as its parameters are there. The sender keeps the whole section:
no rank can apply the step before all ranks have everything, so until then nothing that is sent changes.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import LinkError
from varuna.core.messages import Assignment, Transfer
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.transport import Group
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.copies import wire
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes, from_bytes
from varuna.process.threads import start

_TAG = 95_000
States = Mapping[int, SectionState]


def sent_later(assignment: Assignment) -> list[Transfer]:
    """Return the transfers of which its rank sends a part once the generation has formed."""
    return [each for each in assignment.transfers if each.follows and each.source_rank == assignment.rank]


def received_later(assignment: Assignment) -> list[Transfer]:
    """Return the transfers of which its rank gets a part once the generation has formed."""
    return [each for each in assignment.transfers if each.follows and each.target_rank == assignment.rank]


class _Sent(NamedTuple):
    """A transfer to another rank, encoded."""

    transfer: Transfer
    header: bytes
    body: Body


class StateSender:
    """Sends what follows to others, one section after another, on a thread of its own."""

    def __init__(
        self,
        group: Group,
        transfers: Iterable[Transfer],
        parts: States,
        *,
        then: Callable[[], object],
        step: int,
        stage: int,
    ) -> None:
        """Start sending.

        Args:
            group: every member of the generation.
            transfers: those whose source this rank is.
            parts: by section, what is sent of it; read in place.
            then: called once all of it has arrived.
            step: the first of the generation.
            stage: that this rank runs; -1: none.

        Raises:
            CheckpointError: a tensor's dtype has no name.
        """
        self._group, self._then, self._sent = group, then, list[_Sent]()
        self._where = {"step": step, "stage": stage}
        for each in transfers:
            layout = SectionLayout.of(parts[each.section])
            self._sent.append(_Sent(each, as_bytes([layout]), Body.of_states([layout], parts)))
        start("state-sender", self._run)

    def _run(self) -> None:
        try:
            for each in self._sent:
                move = each.transfer
                with span("send-rest", **self._where, rank=move.source_rank, index=move.section):
                    self._send(each)
            for target in dict.fromkeys(each.transfer.target_rank for each in self._sent):
                wire.await_answer(self._line(target))  # what is on its way needs the group
        except wire.PeerLost:
            return  # other links say which
        self._then()

    def _send(self, sent: _Sent) -> None:
        line, step = self._line(sent.transfer.target_rank), self._where["step"]
        opening = wire.offer_copy(line, wire.CopyKind.REST, step, sent.header, sent.body.size_bytes)

        def fill(first: int, part: Tensor) -> bool:
            sent.body.read(first, part)
            return True

        assert opening is not None, "whoever was promised it takes it"
        wire.send_parts(line, opening, fill, lambda part_s: None)

    def _line(self, target: int) -> wire.CopyChannel:
        return wire.CopyChannel(self._group, target, _TAG)


class StateReceiver:
    """Takes what follows into a stage, from each source on a thread of its own."""

    def __init__(
        self,
        group: Group,
        transfers: Iterable[Transfer],
        take: Callable[[SectionState], None],
        *,
        inbox: Inbox,
        step: int,
        stage: int,
    ) -> None:
        """Start receiving.

        Args:
            group: every member of the generation.
            transfers: those whose target this rank is.
            take: puts the rest of a section's state into the stage; called by one thread at a time.
            inbox: of the generation, for the thread that waits.
            step: the first of the generation.
            stage: that this rank runs.
        """
        self._group, self._take, self._inbox, self._where = group, take, inbox, {"step": step, "stage": stage}
        self._lock, self._closed, self._progress = threading.Lock(), False, 0
        self._failure: LinkError | None = None
        ordered = sorted(transfers, key=lambda each: each.source_rank)  # of one source, they stay in order
        self._missing = {each.section: each.source_rank for each in ordered}
        for source, its in groupby(ordered, key=lambda each: each.source_rank):
            self._start(source, tuple(its))

    @property
    def is_over(self) -> bool:
        """Whether everything has come."""
        return not self._missing

    def wait(self) -> None:
        """Let the training thread wait until everything has come.

        Raises:
            LinkError: a source is gone.
            GenerationEnded: the manager ended the generation.
        """
        while self._missing:
            seen = self._progress  # each part that comes begins another wait: many of them are not a deadlock
            if self._failure is not None:
                raise self._failure
            self._inbox.wait(partial(self._is_news, seen), self._awaited)

    def close(self) -> None:
        """Take nothing more into the stage."""
        with self._lock:
            self._closed = True

    def _start(self, source: int, transfers: Sequence[Transfer]) -> None:
        line = wire.CopyChannel(self._group, source, _TAG)

        def run() -> None:
            try:
                for each in transfers:
                    with span("take-rest", **self._where, rank=each.target_rank, index=each.section):
                        self._receive(line)
                wire.send_answer(line, yes=True)
            except Exception as error:  # noqa: BLE001  the thread that waits for this one must hear why it ended
                named = ", ".join(str(each.section) for each in transfers)
                self._failure = LinkError(
                    f"the optimizer state of sections {named} did not come from rank {source}: {error}"
                )
                self._stir()

        start("state-receiver", run)

    def _receive(self, line: wire.CopyChannel) -> None:
        opening, header = wire.next_offer(line)
        [layout] = from_bytes(header)
        memory = torch.empty(layout.size_bytes, dtype=torch.uint8)
        body = Body.of_memory([memory])

        def write(first: int, part: Tensor) -> None:
            body.write(first, part)
            self._stir()

        wire.send_answer(line, yes=True)
        if not wire.receive_parts(line, opening, write):
            raise wire.PeerLost("it was broken off")
        with self._lock:
            if not self._closed:
                self._take(layout.state_in(memory))
                del self._missing[layout.section]
        self._stir()

    def _stir(self) -> None:
        self._progress += 1  # of several threads, one may be lost in another's
        self._inbox.stir()

    def _is_news(self, seen: int) -> bool:
        return self._progress != seen or not self._missing or self._failure is not None

    def _awaited(self) -> Awaited:
        missing = dict(self._missing)
        named = ", ".join(str(section) for section in sorted(missing))
        return Awaited(f"the optimizer state of sections {named}", tuple(sorted(set(missing.values()))))
