"""Batch normalisation with ``momentum=None``, whose running statistics are plain averages over all batches so far.

Its forward() makes a Python number of the counter that it has just advanced, and a graph would keep that number. Here
the same is written with tensors.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Norm: Any = nn.modules.batchnorm._BatchNorm


def count_with_tensors(model: nn.Module) -> None:
    """Let every such layer that runs torch's own code compute its averages with tensors."""
    for each in model.modules():
        cumulative = isinstance(each, _Norm) and each.momentum is None and each.track_running_stats
        if cumulative and type(each).forward is _Norm.forward:
            each.forward = MethodType(_forward, each)


def _forward(self: Any, x: Tensor) -> Tensor:
    if not self.training or self.running_mean is None or self.num_batches_tracked is None:
        unchanged: Tensor = _Norm.forward(self, x)
        return unchanged
    self._check_input_dim(x)
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    made = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        share = (1.0 / self.num_batches_tracked).to(mean.dtype)
        self.running_mean.mul_(1 - share).add_(mean * share)
        self.running_var.mul_(1 - share).add_(variance * share)
    return made
