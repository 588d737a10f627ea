"""A loss that never has all logits is cross-entropy, forward and backward."""

import torch
from torch import Tensor, nn

from examples.loss_in_pieces import IGNORED, loss_in_pieces
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition


def test_a_loss_in_pieces_is_cross_entropy() -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (3, 7))
    targets[0, :4] = IGNORED
    found = []
    for in_pieces in (True, False):
        torch.manual_seed(1)
        hidden, weight = torch.randn(3, 7, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        if in_pieces:
            loss = loss_in_pieces(hidden, weight, targets, length=4).sum() / (targets != IGNORED).sum()
        else:
            loss = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1])


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(input_ids)))
        return loss_in_pieces(hidden, self.head.weight, labels).sum() / (labels != IGNORED).sum()


def test_it_is_captured_for_any_number_of_examples() -> None:
    tokens = torch.zeros(2, 20, dtype=torch.int64)
    model = partition(Recipe(Language), {"input_ids": tokens, "labels": tokens})
    assert "head.weight" in model.sections[-1].parameters
