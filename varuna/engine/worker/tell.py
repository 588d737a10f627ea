"""Facts that one rank alone knows, told to all ranks of the grid between two steps."""

import contextlib
from collections.abc import Hashable

import torch

from varuna.core.errors import LinkError
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.worker.generation import Generation


def tell_all(generation: Generation, key: Hashable, data: bytes | None, what: str) -> bytes:
    """Return the bytes that one rank passes, on every rank; all ranks of the grid call this at the same step.

    Args:
        generation: the running one.
        key: used once in a generation, and equal on all ranks.
        data: of the rank that speaks; None on all others.
        what: it is, for messages about the wait.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke, or nothing came within the bound.
    """
    size = torch.tensor([len(data or b"")], dtype=torch.int64)
    generation.reducer.sum_over_grid(("size", key), size, what)
    if not int(size):
        return b""
    body = torch.zeros(int(size), dtype=torch.uint8)
    if data:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    generation.reducer.sum_over_grid(("told", key), body, what)  # one writer: adding bytes is exact
    with contextlib.suppress(GenerationEnded, LinkError):  # after the last step, a rank that has heard it may leave
        generation.reducer.sum_over_grid(("heard", key), torch.zeros(1), what)
    return body.numpy().tobytes()
