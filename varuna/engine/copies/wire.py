"""Messages between the owner of a state and its keeper: one copy after another, each announced and in parts.

For each copy, of a state or of one section's sums of gradients, and for the rest of a state that moves:

1. owner: what it is, of which step, and the sizes of header, body and parts
2. owner: the header
3. keeper: whether it takes it
4. owner: the parts, each with a word: 1, or 0 if the copy is broken off
5. keeper: that all has come, where the owner waits for that
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.engine.base.transport import Group
from varuna.engine.device.host_copies import CPU_COPIES, HostCopies

TAG = 90_000
WORD_BYTES = 8
"""After each part: 1 if it is one."""
PART_BYTES = 4 * 2**20 - WORD_BYTES
"""Pinned memory for both is a power of two."""
SMALL_PART_BYTES = 2**20 - WORD_BYTES
"""Of states: the training's messages wait behind a part, 8 ms at 1 Gb/s."""


class PeerLost(Exception):
    """The other rank is gone, or the generation has ended; other links say which."""


class CopyKind(IntEnum):
    """The content of a copy."""

    STATE = 0
    SUM = 1
    REST = 2


class CopyChannel(NamedTuple):
    """Messages of one kind between this rank and another; answers have the next tag."""

    group: Group
    """every member of the generation"""
    peer: int
    tag: int = TAG


class CopyHeader(NamedTuple):
    """The announcement with which a copy begins."""

    kind: int
    step: int
    header_bytes: int
    body_bytes: int
    part_bytes: int


def offer_copy(
    line: CopyChannel, kind: CopyKind, step: int, header: bytes, body_bytes: int, part_bytes: int | None = None
) -> CopyHeader | None:
    """Announce a copy, which goes in parts of ``part_bytes`` (None: large ones); None if the keeper does not take it.

    Raises:
        PeerLost: the keeper.
    """
    words = max(
        1, -(-min(part_bytes or PART_BYTES, body_bytes) // WORD_BYTES)
    )  # whole ones: another word follows each part
    opening = CopyHeader(kind, step, len(header), body_bytes, words * WORD_BYTES)
    _send(line, torch.tensor(opening, dtype=torch.int64))
    _send(line, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return opening if await_answer(line) else None


def send_parts(
    line: CopyChannel,
    opening: CopyHeader,
    fill: Callable[[int, Tensor], bool],
    pause: Callable[[float], object],
    copies: HostCopies = CPU_COPIES,
) -> bool:
    """Send the body; False if it was broken off.

    Args:
        line: to the rank that takes it.
        opening: of the copy.
        fill: puts the bytes from a place of the body on into a part; False: the copy is worth nothing any more.
        pause: called after each part with the seconds that it took.
        copies: by which parts are filled.

    Raises:
        PeerLost: the keeper.
    """
    buffer = copies.room(opening.part_bytes + WORD_BYTES).zero_()
    part, word = buffer[: opening.part_bytes], buffer[opening.part_bytes :].view(torch.int64)
    for first in _firsts(opening):
        goes_on = fill(first, part)
        # In the same message as the part: a keeper that reads 0 drops the copy at once.
        word.fill_(goes_on)
        begin_s = time.monotonic()
        _send(line, buffer)
        if not goes_on:
            return False
        pause(time.monotonic() - begin_s)
    return True


def next_offer(line: CopyChannel) -> tuple[CopyHeader, bytes]:
    """Wait for the next copy that is announced, and its header.

    Raises:
        PeerLost: the owner.
    """
    message = _receive(line, len(CopyHeader._fields) * WORD_BYTES)
    opening = CopyHeader(*message.view(torch.int64).tolist())
    return opening, _receive(line, opening.header_bytes).numpy().tobytes()


def send_answer(line: CopyChannel, *, yes: bool) -> None:
    """Say whether what was offered is taken, or that it has come.

    Raises:
        PeerLost: the owner.
    """
    _send(line._replace(tag=line.tag + 1), torch.tensor([int(yes)], dtype=torch.int64))


def await_answer(line: CopyChannel) -> bool:
    """Wait for the other end's answer.

    Raises:
        PeerLost: it is.
    """
    return bool(_receive(line._replace(tag=line.tag + 1), WORD_BYTES).view(torch.int64).item())


def receive_parts(line: CopyChannel, opening: CopyHeader, write: Callable[[int, Tensor], None]) -> bool:
    """Receive the body; False if it was broken off.

    Raises:
        PeerLost: the owner.
    """
    for first in _firsts(opening):
        message = _receive(line, opening.part_bytes + WORD_BYTES)
        if not message[opening.part_bytes :].view(torch.int64).item():
            return False
        write(first, message[: opening.part_bytes])
    return True


def _firsts(opening: CopyHeader) -> Iterator[int]:
    # A body without bytes has a part, too: its word says that the copy is whole.
    return iter(range(0, max(1, opening.body_bytes), opening.part_bytes))


def _send(line: CopyChannel, message: Tensor) -> None:
    with _noticing_the_end():
        line.group.send(message, line.peer, line.tag).wait()


def _receive(line: CopyChannel, size_bytes: int) -> Tensor:
    with _noticing_the_end():
        return line.group.receive(torch.empty(size_bytes, dtype=torch.uint8), line.peer, line.tag).wait()


@contextmanager
def _noticing_the_end() -> Iterator[None]:
    """Tell errors of links from all others, which are RuntimeErrors too."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error
