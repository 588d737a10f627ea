"""An optimizer that a script has built, as a function that builds the same over the parameters of a stage.

What is built is a copy of the object, never a call of its class: attributes, groups that a constructor has checked and
hooks stay as they are. In a copy the stage's parameters take the place of the script's, wherever it refers to them;
parameters of other stages are stand-ins without data, which have no gradient.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from varuna.core.errors import UsageError
from varuna.partition.object_copies import ObjectCopier, is_object
from varuna.partition.optimizers import NamedParameters
from varuna.partition.originals.referred import variables
from varuna.partition.watching.user_lines import place_of

_HOOKS = {"_optimizer_step_pre_hooks": "step_pre_hook", "_optimizer_step_post_hooks": "step_post_hook"}
_DEEPEST = 4


class OptimizerLike:
    """Builds an optimizer like one that the script has built, with its groups, over some of its parameters."""

    def __init__(
        self, whole: torch.optim.Optimizer, named: NamedParameters, *, is_scheduled: bool = False, in_loop: bool = True
    ) -> None:
        """Take it as it is now.

        Args:
            whole: over the model's parameters.
            named: those parameters, with their names.
            is_scheduled: a scheduler is built for each copy, which finds the rates from before there was one.
            in_loop: the training loop may write options of its groups.

        Raises:
            UsageError: it is over other parameters, or runs code that knows the script's own objects.
        """
        self.whole, self._is_scheduled, self.in_loop = whole, is_scheduled, in_loop
        self.begin(named)

    def begin(self, named: NamedParameters) -> None:
        """Take options and attributes as they are now: step 0 uses what the script has written before its loop.

        Args:
            named: the model's parameters as they are now; layers may have been replaced.

        Raises:
            UsageError: see the constructor.
        """
        whole, names = self.whole, {id(parameter): name for name, parameter in named}
        if not all(id(parameter) in names for group in whole.param_groups for parameter in group["params"]):
            raise UsageError(
                f"optimizer= is {an(whole)} over parameters that model= does not have. Pass the module whose "
                "parameters it was built from, or a function, such as "
                "lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)."
            )
        _refuse_closures(whole, frozenset(names))
        self._stand_ins = {name: _stand_in(parameter) for name, parameter in named}
        exchanged = {id(parameter): self._stand_ins[name] for name, parameter in named}
        self._first: torch.optim.Optimizer = ObjectCopier(exchanged).of(whole)
        if self._is_scheduled:
            for group in self._first.param_groups:
                if "initial_lr" in group:
                    group["lr"] = group.pop("initial_lr")

    def __call__(self, named: NamedParameters) -> torch.optim.Optimizer:
        """Build an optimizer over those of ``named`` that the whole one has."""
        # first all stand-ins as they are, which have no gradient; then those of this stage's parameters are exchanged
        exchanged: dict[int, Any] = {id(value): value for value in self._stand_ins.values()}
        exchanged |= {id(self._stand_ins[name]): parameter for name, parameter in named}
        copying = ObjectCopier(exchanged)
        built: torch.optim.Optimizer = copying.of(self._first)
        here = {id(parameter) for _, parameter in named}
        for each in copying.optimizers:
            _keep(each, here)
        return built


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}


def an(found: object) -> str:
    """Return the name of an object's class, with an article."""
    name = type(found).__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")  # also of a quantized one
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _keep(optimizer: torch.optim.Optimizer, here: set[int]) -> None:
    """Leave out what belongs to parameters of other stages."""
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if id(parameter) in here]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]
    for parameter in [each for each in optimizer.state if isinstance(each, Tensor) and id(each) not in here]:
        del optimizer.state[parameter]


# -- code that a copy would run with the script's objects -------------------------------------------------------


def _refuse_closures(whole: torch.optim.Optimizer, parameters: frozenset[int]) -> None:
    """Refuse functions of an optimizer's that know the script's own model, parameters or optimizer.

    Raises:
        UsageError: names the function, and what it uses.
    """
    for label, function in functions_in(whole, set()):
        for name, value in _reached(function, set(), 0):
            if what := _is_own(value, whole, parameters):
                raise UsageError(
                    f"optimizer= is {an(whole)} with {label}, {_called(function)} at {place_of(_plain(function))}, "
                    f"which uses {what} ({name}) of the script. Varuna trains copies on the workers, so that would "
                    "read and change what is not trained. Write it over the optimizer that it is given: "
                    "optimizer.param_groups has the parameters of the stage. Or leave it out, and pass before_step=, "
                    "a function of the (name, parameter) list that runs just before the update, or after_step=, which "
                    "runs after it with all parameters and buffers."
                )


def functions_in(holder: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Functions that an optimizer would call: its hooks, and those in its attributes."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for name, value in list(vars(holder).items()):
        if hasattr(value, "_wrapped_by_lr_sched"):  # step(), counted by a scheduler of the script's
            continue
        label = f"a {_HOOKS[name]}" if name in _HOOKS else f"the attribute {name}"
        for each in value.values() if isinstance(value, Mapping) else [value]:
            if name in _HOOKS:
                yield label, each
            elif isinstance(each, FunctionType | MethodType | functools.partial):
                yield label, _plain(each)  # what it is bound to is exchanged with the rest
            elif isinstance(each, torch.optim.Optimizer) or (each is value and is_object(each)):
                yield from functions_in(each, seen)


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function if isinstance(function, FunctionType) else type(function).__call__


def _called(function: Any) -> str:
    return getattr(_plain(function), "__name__", type(function).__name__)


def _reached(function: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield what a function can use beside its arguments, by name: its variables, and what is in those."""
    if id(function) in seen or depth > _DEEPEST:
        return
    seen.add(id(function))
    for name, value in _names_of(function):
        for inner, each in _inside(name, value, 0):
            yield inner, each
            if isinstance(each, FunctionType | MethodType | functools.partial):
                yield from _reached(each, seen, depth + 1)


def _names_of(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args))
        yield from function.keywords.items()
        yield _called(function), function.func
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield _called(function), function.__func__
    elif isinstance(function, FunctionType):
        yield from ((name or "a default", value) for name, value in variables(function))
    else:
        yield from vars(function).items() if hasattr(function, "__dict__") else ()


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A value and those in containers, or in attributes of plain objects, up to a depth."""
    yield name, value
    if depth >= _DEEPEST or isinstance(value, Tensor | nn.Module | torch.optim.Optimizer | type):
        return
    if isinstance(value, Mapping):
        for key, each in list(value.items())[:64]:
            yield from _inside(f"{name}[{key!r}]", each, depth + 1)
    elif isinstance(value, Sequence | set) and not isinstance(value, str | bytes):
        for number, each in enumerate(list(value)[:64]):
            yield from _inside(f"{name}[{number}]", each, depth + 1)
    elif isinstance(value, weakref.ref):
        yield from _inside(name, value(), depth + 1)
    elif is_object(value):
        for key, each in list(vars(value).items())[:64]:
            yield from _inside(f"{name}.{key}", each, depth + 1)


def _is_own(value: Any, whole: torch.optim.Optimizer, parameters: frozenset[int]) -> str:
    """Return what of the script's a value is; empty if it is something else."""
    if isinstance(value, nn.Module) and any(id(each) in parameters for each in value.parameters()):
        return "the model"
    if isinstance(value, Tensor) and id(value) in parameters:
        return "a parameter"
    is_whole = value is whole or (
        isinstance(value, torch.optim.Optimizer)
        and any(id(each) in parameters for group in value.param_groups for each in group["params"])
    )
    return "the optimizer" if is_whole else ""
