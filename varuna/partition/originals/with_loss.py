"""A model together with the parameters of its loss (proxies, ArcFace, weights of tasks), which train with it."""

from collections.abc import Iterator
from typing import Any

from torch import nn

_NAMES = ("loss", "criterion", "loss_module")
_MODEL = "_model_itself"


class ModelAndLoss(nn.Module):
    """Computes as the model, and has the loss's modules, parameters and buffers beside the model's own.

    The model's names stay as they are; the loss's begin with ``loss.``, or what the model leaves free.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        taken = {name.partition(".")[0] for name, _ in (*model.named_modules(), *model.named_parameters())}
        self.of_loss = next(name for name in _NAMES if name not in taken)
        self._modules[_MODEL], self._modules[self.of_loss] = model, loss
        self.training = model.training
        self.forward = model.forward

    @property
    def model_itself(self) -> nn.Module:
        """The model, without the loss."""
        found = self._modules[_MODEL]
        assert found is not None
        return found

    @property
    def loss_itself(self) -> nn.Module:
        """The loss, without the model."""
        found = self._modules[self.of_loss]
        assert found is not None
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self.model_itself(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The loss, and what the model has."""
        own = self.__dict__["_modules"]
        return own[name] if name in own else getattr(own[_MODEL], name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """List modules by the names of the model, and those of the loss below its own."""
        memo = set() if memo is None else memo
        yield prefix, self
        yield from self.model_itself.named_modules(memo, prefix, remove_duplicate)
        below = f"{prefix}.{self.of_loss}" if prefix else self.of_loss
        yield from self.loss_itself.named_modules(memo, below, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module of such a name."""
        first, _, rest = target.partition(".")
        return (
            self.loss_itself.get_submodule(rest) if first == self.of_loss else self.model_itself.get_submodule(target)
        )

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return parameters and buffers by such names."""
        found = self.model_itself.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        below = f"{prefix}{self.of_loss}."
        return self.loss_itself.state_dict(destination=found, prefix=below, keep_vars=keep_vars)
