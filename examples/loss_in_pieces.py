"""Cross-entropy over a large vocabulary that never has all logits: a few tokens at a time, forward and backward.

    class Model(nn.Module):
        def forward(self, input_ids, labels):
            losses = loss_in_pieces(self.body(input_ids), self.head.weight, labels)
            return losses.sum() / (labels != IGNORED).sum()

The numbers are those of ``cross_entropy(head(hidden).float(), labels)`` up to the order of sums. It costs the head's
forward once more in backward, and the memory of one piece: two to three times examples x ``length`` x words in fp32.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

IGNORED = -100
LENGTH = 16


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.length = length
        losses = [
            nn.functional.cross_entropy((x @ weight.T).float().mT, y, ignore_index=IGNORED, reduction="none")
            for x, y in zip(torch.split(hidden, length, 1), torch.split(targets, length, 1), strict=True)
        ]
        return torch.cat(losses, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, targets.shape[1], ctx.length):
            piece = slice(begin, begin + ctx.length)
            x, y = hidden[:, piece].flatten(0, 1), targets[:, piece].flatten()
            odds = (x @ weight.T).float().softmax(-1)
            odds[torch.arange(len(y), device=y.device), y.clamp(min=0)] -= 1
            odds *= torch.where(y == IGNORED, 0, gradients[0][:, piece].flatten())[:, None]
            to_logits = odds.to(x.dtype)
            to_hidden[:, piece] = (to_logits @ weight).view_as(hidden[:, piece])
            to_weight += to_logits.T @ x
        return to_hidden, to_weight.to(weight.dtype), None, None


def loss_in_pieces(hidden: Tensor, weight: Tensor, targets: Tensor, length: int = LENGTH) -> Tensor:
    """Return the losses of tokens, 0 where they are ignored, without all logits at once.

    Args:
        hidden: what the head would get, (examples, tokens, width).
        weight: of the head, (words, width).
        targets: words, (examples, tokens).
        length: tokens of each example in a piece. (The number of examples is left open: micro-batches may be short.)
    """
    return cast(Tensor, _InPieces.apply(hidden, weight, targets, length))  # type: ignore[no-untyped-call]
