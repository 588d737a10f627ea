"""The script's model with its loss computed inside, and which optimizers can be built again for a stage."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from varuna.core.errors import UsageError
from varuna.job.built import GivenModel

ComputeLoss = Callable[[nn.Module, dict[str, Any]], Tensor]
_inside: set[int] = set()
"""modules whose loss is being computed: the call in there is the model's own"""


class ReturningLoss(GivenModel):
    """Builds copies of a module that return their loss."""

    def __init__(self, module: nn.Module, compute_loss: ComputeLoss) -> None:
        """Describe the copies.

        Args:
            module: the model.
            compute_loss: replaces their ``forward``: gets the copy and its inputs, returns a scalar.
        """
        super().__init__(module)
        self._compute_loss = compute_loss

    def __call__(self) -> nn.Module:
        """A copy."""
        return _returning_loss(super().__call__(), self._compute_loss)


def _returning_loss(module: nn.Module, compute_loss: ComputeLoss) -> nn.Module:
    """The module, of a class of the same name whose ``forward`` is ``compute_loss``."""
    own = type(module)

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if id(self) in _inside:
            return own.forward(self, *args, **inputs)
        _inside.add(id(self))
        try:
            return compute_loss(self, inputs)
        finally:
            _inside.discard(id(self))

    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})
    return module


def check_optimizer(whole: object) -> torch.optim.Optimizer:
    """Refuse optimizers that are more than an update of each parameter.

    Raises:
        UsageError: it is one, or none of torch's kind.
    """
    if type(whole).__name__ in ("LayerWiseDummyOptimizer", "DummyOptim") or not isinstance(
        whole, torch.optim.Optimizer
    ):
        raise UsageError(
            f"the optimizer is a {type(whole).__name__}, which cannot be built again for the parameters of one stage. "
            "Use one that is built from parameter groups, such as optim='adamw_torch'."
        )
    return whole
