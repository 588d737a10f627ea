"""Cross-entropy over a large vocabulary that never has all logits: a few tokens at a time, forward and backward.

    class Model(nn.Module):
        def forward(self, input_ids, labels):
            losses = loss_in_pieces(self.body(input_ids), self.head.weight, labels)
            return losses.sum() / (labels != IGNORED).sum()

The numbers are those of ``cross_entropy(head(hidden).float(), labels)`` up to the order of sums. It costs the head's
forward once more in backward, and the memory of one piece: two to three times ``rows`` x words in fp32.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

IGNORED = -100
ROWS = 64


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.rows = rows
        flat, wanted = hidden.flatten(0, -2), targets.flatten()
        losses = [
            nn.functional.cross_entropy((x @ weight.T).float(), y, ignore_index=IGNORED, reduction="none")
            for x, y in zip(flat.split(rows), wanted.split(rows), strict=True)  # type: ignore[no-untyped-call]
        ]
        return torch.cat(losses).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        flat, wanted, scales = hidden.flatten(0, -2), targets.flatten(), gradients[0].flatten()
        to_hidden, to_weight = torch.empty_like(flat), torch.zeros_like(weight, dtype=torch.float32)
        for at in range(0, len(wanted), ctx.rows):
            x, y, scale = flat[at : at + ctx.rows], wanted[at : at + ctx.rows], scales[at : at + ctx.rows]
            odds = (x @ weight.T).float().softmax(-1)
            odds[torch.arange(len(y)), y.clamp(min=0)] -= 1
            odds *= torch.where(y == IGNORED, 0, scale)[:, None]
            to_logits = odds.to(x.dtype)
            to_hidden[at : at + ctx.rows] = to_logits @ weight
            to_weight += to_logits.T @ x
        return to_hidden.view(hidden.shape), to_weight.to(weight.dtype), None, None


def loss_in_pieces(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int = ROWS) -> Tensor:
    """Losses of tokens, 0 where they are ignored, without all logits at once.

    Args:
        hidden: what the head would get, (examples, tokens, width).
        weight: of the head, (words, width).
        targets: words, (examples, tokens).
        rows: tokens of a piece.
    """
    return cast(Tensor, _InPieces.apply(hidden, weight, targets, rows))  # type: ignore[no-untyped-call]
