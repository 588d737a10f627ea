"""Losses over alignments (``ctc_loss``) in a captured graph: one operation, with a loss for each example.

How much a kernel of torch keeps for its backward depends on the lengths of the targets, and export can hold no tensor
of such a size. This operation keeps nothing: its backward computes that again. The mean or the sum over the examples
is taken outside, where the graph shows what it is divided by.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
NAME = "varuna::ctc_loss"
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_SIGNATURE = inspect.signature(F.ctc_loss)


@torch.library.custom_op(NAME, mutates_args=())
def _losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    found, _ = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return torch.where(found == torch.inf, 0.0, found) if zero_infinity else found


@torch.library.custom_op("varuna::ctc_loss_backward", mutates_args=())
def _gradient(
    each: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    given = (log_probs, targets, input_lengths, target_lengths)
    found, alpha = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    made: Tensor = aten._ctc_loss_backward.Tensor(each.contiguous(), *given, found, alpha, blank, zero_infinity)
    return made


@_losses.register_fake
def _(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])  # [time, examples, classes] -> [examples]


@_gradient.register_fake
def _(each: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.how = inputs[4:]


def _backward(ctx: Any, each: Tensor) -> tuple[Tensor | None, ...]:
    return (_gradient(each, *ctx.saved_tensors, *ctx.how), *[None] * 5)


_losses.register_autograd(_backward, setup_context=_keep)


class Alignments(TorchFunctionMode):
    """Replaces ``ctc_loss`` of a captured model by that operation, if lengths are given as tensors."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        if func is F.ctc_loss or func is torch.ctc_loss:
            given = _SIGNATURE.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            log_probs, targets, inputs, lengths, blank, reduction, zero_infinity = given.args
            if log_probs.dim() == 3 and isinstance(inputs, Tensor) and isinstance(lengths, Tensor):
                each = _losses(log_probs, targets, inputs, lengths, blank, zero_infinity)
                return _reduced(each, lengths, _REDUCTIONS.get(reduction, reduction))
        return func(*args, **(kwargs or {}))


def _reduced(each: Tensor, target_lengths: Tensor, reduction: int) -> Tensor:
    """Reduce as torch does: a mean of each loss over its targets, then over the examples."""
    if reduction == _REDUCTIONS["mean"]:
        return (each / target_lengths.to(each.device, each.dtype).clamp_min(1)).mean()
    return each.sum() if reduction == _REDUCTIONS["sum"] else each
