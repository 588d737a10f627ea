"""The optimizers that the user's ``optimizer=`` returns, as one: several of them step together."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from varuna.checkpoint.io.section_state import AVERAGE as AVERAGE
from varuna.core.errors import UsageError
from varuna.data.randomness import next_in_turn

NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]


class SeveralOptimizers(torch.optim.Optimizer):
    """Steps several optimizers, each over parameters of its own; their groups and states are its own.

    So a scheduler finds all groups, and state moves and is saved by parameter.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Join ``parts``, which hold no parameter twice."""
        groups = [group for part in parts for group in part.param_groups]
        super().__init__(groups, {})
        self.parts = tuple(parts)
        self.param_groups = groups  # the very groups that the parts read: torch's constructor would copy some
        self.state = defaultdict(dict)
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nothing needs what torch's returns
        """Step each of them."""
        for number, part in enumerate(self.parts):
            next_in_turn(1 + number)
            part.step()


def build_optimizer(factory: OptimizerFactory, named: NamedParameters) -> torch.optim.Optimizer:
    """Build one optimizer of what the user's function returns for some parameters.

    Raises:
        UsageError: it returns something else than optimizers that need only gradients, over these parameters.
    """
    built: Any = factory(named)
    parts = list(built) if isinstance(built, list | tuple) else [built]
    if not parts:
        raise UsageError(
            "optimizer= returned an empty list: there must be an optimizer for the parameters it was given"
        )
    for part in parts:
        _check(part)
    given, held = {id(parameter) for _, parameter in named}, set[int]()
    for part in parts:
        mine = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        if not mine <= given:
            raise UsageError(
                "optimizer= returned an optimizer over parameters that it was not given. It is called on every worker "
                "with the parameters of that worker's stage: build it from its argument, not from a model of your own."
            )
        if mine & held:
            twice = [name for name, parameter in named if id(parameter) in mine & held]
            raise UsageError(f"optimizer= returned two optimizers over {twice[0]}: each parameter may be in one only")
        held |= mine
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)


class Averaging:
    """Moves the average of every parameter a little towards its value, after each step.

    It is part of the optimizer's state, so it moves and is saved with it.
    """

    def __init__(self, decay: float, *, from_start: bool = False) -> None:
        """Keep ``decay`` of the average, in [0, 1).

        Args:
            decay: of the average.
            from_start: it begins with the parameters before the first step; else with those after it.
        """
        self._decay, self._from_start = decay, from_start
        self._first: dict[torch.nn.Parameter, torch.Tensor] = {}  # state must be empty before torch's first step

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the parameters that an optimizer is about to change, if the average begins with them."""
        parameters = (p for group in optimizer.param_groups for p in group["params"]) if self._from_start else ()
        self._first = {p: p.detach().clone() for p in parameters if AVERAGE not in optimizer.state.get(p, {})}

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Move the averages towards the parameters that an optimizer has just changed."""
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            state = optimizer.state[parameter]
            if AVERAGE not in state:
                state[AVERAGE] = self._first.get(parameter, parameter.detach()).clone()
            state[AVERAGE].lerp_(parameter.detach(), 1 - self._decay)
        self._first = {}


@dataclass(frozen=True)
class AveragingFactory:
    """Builds the user's optimizer, which also averages what it updates."""

    factory: OptimizerFactory
    decay: float
    from_start: bool = False

    @property
    def __wrapped__(self) -> OptimizerFactory:
        """The user's function, where ``inspect.unwrap`` looks."""
        return self.factory

    def __call__(self, named: NamedParameters) -> torch.optim.Optimizer:
        """Build the user's optimizer over ``named``, with hooks that average."""
        optimizer = build_optimizer(self.factory, named)
        averaging = Averaging(self.decay, from_start=self.from_start)
        optimizer.register_step_pre_hook(averaging.before)
        optimizer.register_step_post_hook(averaging)
        return optimizer


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizer, and those that it steps."""
    return (optimizer, *optimizer.parts) if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def is_torchs(built: torch.optim.Optimizer) -> bool:
    """Return whether a step of this optimizer runs no code but torch's."""
    return all(
        (type(part).__module__.startswith("torch.optim.") or isinstance(part, SeveralOptimizers))
        and "step" not in vars(part)
        and all(
            isinstance(getattr(hook, "__self__", hook), Averaging)
            for hook in (*part._optimizer_step_pre_hooks.values(), *part._optimizer_step_post_hooks.values())
        )
        for part in parts_of(built)
    )


def calls_closure(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot be used whose step() runs the model again, and the way out."""
    return (
        f"optimizer= returned {type(optimizer).__name__}, whose step() calls a closure that runs the model again. "
        "Varuna runs the model once per step: use an optimizer that needs only the gradients, such as AdamW."
    )


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer= must return a torch optimizer, or a list of them, but returned {type(optimizer).__name__}. "
            "Write optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)"
        )
    if type(optimizer).__module__.startswith("torchao."):
        raise UsageError(
            f"optimizer= returned {type(optimizer).__name__} of torchao, whose state consists of tensors of classes of "
            "its own: they cannot be moved to another worker, or saved. Of optimizers with states in 8 bits those of "
            "bitsandbytes work, such as bitsandbytes.optim.AdamW8bit."
        )
    if any(isinstance(part, torch.optim.SparseAdam) for part in parts_of(optimizer)):
        raise UsageError(
            "optimizer= returned SparseAdam, which wants sparse gradients. Varuna adds the gradients of micro-batches "
            "and replicas up in dense ones: use torch.optim.Adam, and leave sparse=True out of nn.Embedding."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(calls_closure(optimizer))
