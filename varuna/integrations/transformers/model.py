"""A model that a script has built already, as Varuna takes it: built again when asked, its loss computed inside."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna.core.errors import UsageError
from varuna.engine.stage.optimizer import NamedParameters, OptimizerFactory

ComputeLoss = Callable[[nn.Module, dict[str, Any]], Tensor]
_inside: set[int] = set()
"""modules whose loss is being computed: the call in there is the model's own"""


class BuiltAlready:
    """Builds copies of a module; their parameters are filled by operations, so that none need memory under fakes."""

    def __init__(self, module: nn.Module, compute_loss: ComputeLoss | None) -> None:
        """Describe the copies.

        Args:
            module: on the CPU.
            compute_loss: replaces their ``forward``: gets the copy and its inputs, returns a scalar. None: they return
                their loss themselves.
        """
        self._module, self._compute_loss = module, compute_loss

    def __call__(self) -> nn.Module:
        """A copy."""
        made: dict[int, Any] = {}
        with torch.no_grad():
            for parameter in self._module.parameters():
                values = torch.empty_like(parameter).copy_(parameter)
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            for buffer in self._module.buffers():
                made[id(buffer)] = buffer.clone()
        module: nn.Module = copy.deepcopy(self._module, made)
        return module if self._compute_loss is None else _returning_loss(module, self._compute_loss)


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


def factory_of(whole: torch.optim.Optimizer, named: NamedParameters) -> OptimizerFactory:
    """What builds an optimizer like ``whole``, with its groups, over some of its parameters.

    Args:
        whole: over the model's parameters; it has made no step.
        named: those parameters, with their names.
    """
    names = {id(parameter): name for name, parameter in named}
    groups = [(frozenset(names[id(p)] for p in group["params"]), _options(group)) for group in whole.param_groups]
    kind: Any = type(whole)
    taken = inspect.signature(kind).parameters
    options = {key: value for key, value in whole.defaults.items() if key in taken}

    def build(some: NamedParameters) -> torch.optim.Optimizer:
        parts = [
            {"params": [parameter for name, parameter in some if name in mine], **copy.copy(rest)}
            for mine, rest in groups
        ]
        built: torch.optim.Optimizer = kind(parts, **options)
        return built

    return build


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parameter group; a scheduler may have changed its learning rate already."""
    rest = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    return {**rest, "lr": group.get("initial_lr", group["lr"])}


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


def load(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module trained values; a tied parameter is in ``values`` once."""
    own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
