"""What crosses between the owner of a state and its keeper: one copy after another, each announced and in parts.

For each copy, of a state or of one section's sums of gradients:

1. owner: what it is, of which step, and the sizes of header, body and parts
2. owner: the header
3. keeper: whether it takes it
4. owner: the parts, each with a word that says whether the copy goes on
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.engine.base.transport import Group

TAG = 90_000
ANSWER_TAG = TAG + 1
PART_BYTES = 4 * 2**20
WORD_BYTES = 8
"""After each part: 1 if it is one."""


class OtherIsGone(Exception):
    """The other rank is gone, or the generation has ended; other links say which."""


class CopyKind(IntEnum):
    """What a copy is of."""

    STATE = 0
    SUM = 1


class Opening(NamedTuple):
    """What a copy begins with."""

    kind: int
    step: int
    header_bytes: int
    body_bytes: int
    part_bytes: int


def offer(group: Group, keeper: int, kind: CopyKind, step: int, header: bytes, body_bytes: int) -> Opening | None:
    """Announce a copy; None if the keeper does not take it.

    Raises:
        OtherIsGone: the keeper.
    """
    words = max(1, -(-min(PART_BYTES, body_bytes) // WORD_BYTES))  # whole ones: another word follows each part
    opening = Opening(kind, step, len(header), body_bytes, words * WORD_BYTES)
    _send(group, keeper, torch.tensor(opening, dtype=torch.int64))
    _send(group, keeper, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    with _noticing_the_end():
        answer = group.receive(torch.zeros(1, dtype=torch.int64), keeper, ANSWER_TAG).wait()
    return opening if answer.item() else None


def send_parts(
    group: Group, keeper: int, opening: Opening, fill: Callable[[int, Tensor], bool], pause: Callable[[float], object]
) -> bool:
    """Send the body; False if it was broken off.

    Args:
        group: every member of the generation.
        keeper: rank that takes it.
        opening: of the copy.
        fill: puts the bytes from a place of the body on into a part; False: the copy is worth nothing any more.
        pause: called after each part with the seconds that it took.

    Raises:
        OtherIsGone: the keeper.
    """
    buffer = torch.zeros(opening.part_bytes + WORD_BYTES, dtype=torch.uint8)
    part, word = buffer[: opening.part_bytes], buffer[opening.part_bytes :].view(torch.int64)
    for first in _firsts(opening):
        goes_on = fill(first, part)
        word.fill_(goes_on)
        begin_s = time.monotonic()
        _send(group, keeper, buffer)
        if not goes_on:
            return False
        pause(time.monotonic() - begin_s)
    return True


def next_offer(group: Group, owner: int) -> tuple[Opening, bytes]:
    """Wait for the next copy that is announced, and its header.

    Raises:
        OtherIsGone: the owner.
    """
    message = _receive(group, owner, len(Opening._fields) * WORD_BYTES)
    opening = Opening(*message.view(torch.int64).tolist())
    return opening, _receive(group, owner, opening.header_bytes).numpy().tobytes()


def answer_offer(group: Group, owner: int, *, takes: bool) -> None:
    """Say whether it is taken.

    Raises:
        OtherIsGone: the owner.
    """
    _send(group, owner, torch.tensor([int(takes)], dtype=torch.int64), ANSWER_TAG)


def receive_parts(group: Group, owner: int, opening: Opening, write: Callable[[int, Tensor], None]) -> bool:
    """Receive the body; False if it was broken off.

    Raises:
        OtherIsGone: the owner.
    """
    for first in _firsts(opening):
        message = _receive(group, owner, opening.part_bytes + WORD_BYTES)
        if not message[opening.part_bytes :].view(torch.int64).item():
            return False
        write(first, message[: opening.part_bytes])
    return True


def _firsts(opening: Opening) -> Iterator[int]:
    return iter(range(0, max(1, opening.body_bytes), opening.part_bytes))


def _send(group: Group, peer: int, message: Tensor, tag: int = TAG) -> None:
    with _noticing_the_end():
        group.send(message, peer, tag).wait()


def _receive(group: Group, owner: int, size_bytes: int) -> Tensor:
    with _noticing_the_end():
        return group.receive(torch.empty(size_bytes, dtype=torch.uint8), owner, TAG).wait()


@contextmanager
def _noticing_the_end() -> Iterator[None]:
    """Tell errors of links from all others, which are RuntimeErrors too."""
    try:
        yield
    except RuntimeError as error:
        raise OtherIsGone(str(error)) from error
