"""All-reduce with half the bytes: what crosses is bf16, what is added up is fp32, in the order of replicas."""

import torch
from torch import Tensor

from varuna.engine.base.transport import Group

AT_ONCE = 2**22
"""Numbers that travel together, so that their buffers stay below 16 MiB."""


def all_reduce_rounded(group: Group, values: Tensor, at_once: int = AT_ONCE) -> None:
    """Sum over all members, in place; blocks. All members get the same bits, the same in every run.

    Each member adds up its share of the numbers as all members have them, and then everyone gathers the shares: as
    many bytes as a ring of bf16, but two roundings whatever the number of members, and no order that is the ring's.

    Args:
        group: the members.
        values: flat, fp32.
        at_once: how many numbers travel together.

    Raises:
        RuntimeError: as ``Group.all_reduce``.
    """
    for chunk in torch.split(values, at_once):
        _reduce(group, chunk)


def _reduce(group: Group, values: Tensor) -> None:
    count, share = values.numel(), -(-values.numel() // group.size)
    sent = torch.zeros(group.size * share, dtype=torch.bfloat16, device=values.device)
    sent[:count].copy_(values)
    mine = group.exchange(sent).view(group.size, share)
    del sent
    total = mine[0].float()
    for row in mine[1:]:
        total.add_(row)
    values.copy_(group.gather(total.to(torch.bfloat16))[:count])
