"""A loss that never has all logits is cross-entropy, forward and backward."""

import torch
from torch import nn

from examples.loss_in_pieces import IGNORED, loss_in_pieces


def test_a_loss_in_pieces_is_cross_entropy() -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (3, 7))
    targets[0, :4] = IGNORED
    found = []
    for in_pieces in (True, False):
        torch.manual_seed(1)
        hidden, weight = torch.randn(3, 7, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        if in_pieces:
            loss = loss_in_pieces(hidden, weight, targets, rows=4).sum() / (targets != IGNORED).sum()
        else:
            loss = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1])
