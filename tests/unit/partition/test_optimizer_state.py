"""Copies of an optimizer's state take the memory of what they copy."""

import torch
from torch import Tensor, nn

from varuna.partition.optimizer_state import OptimizerState


def test_a_copy_of_state_that_is_part_of_larger_memory_takes_its_own_bytes_alone() -> None:
    """As offloaded state, which lies in one piece for each section."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    named = dict(model.named_parameters())
    optimizer = torch.optim.Adam(named.values())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    arena = torch.zeros(10_000)
    for its in optimizer.state.values():
        its["exp_avg"] = arena[: its["exp_avg"].numel()].view(its["exp_avg"].shape)
    undo = OptimizerState(optimizer, list(named.items())).copies()
    copied = [its for _, table in undo.tables for its in table.values()]
    tensors = [value for its in copied for value in its.values() if isinstance(value, Tensor)]
    assert len(tensors) >= 3 * len(named)
    assert {value.untyped_storage().nbytes() - value.nbytes for value in tensors} == {0}
    arena.add_(1)
    undo.restore()
    assert all(its["exp_avg"].eq(0).all() for its in optimizer.state.values())
