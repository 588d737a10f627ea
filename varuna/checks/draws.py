"""Random operations under control, so that two computations of the same can be compared.

``SameDraws``: whatever draws, draws the same in both. ``NoDraws``: nothing is drawn, every draw is a constant; then a
batch of four samples can be compared with its parts too, whose draws have other shapes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from varuna.data.randomness import derive_key


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every random operation draws by its name and shapes, whenever it runs and however its arguments lie in memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One op."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        torch.default_generator.manual_seed(derive_key(0, str(func), repr(shapes)))
        strided = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_contiguous()]
        return _in_order(func, args, kwargs or {}, strided) if strided else func(*args, **(kwargs or {}))


def _in_order(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], strided: list[Tensor]) -> Any:
    """Draw in the order of indices, whatever the order in memory; the result keeps its strides."""
    flat_args, flat_kwargs = tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
    made = func(*flat_args, **flat_kwargs)
    if func._schema.is_mutable:
        return args[0].copy_(made)
    layouts = {leaf.shape: leaf for leaf in strided}
    return tree_map_only(
        Tensor,
        lambda each: (
            torch.empty_like(layouts[each.shape], dtype=each.dtype).copy_(each) if each.shape in layouts else each
        ),
        made,
    )


class NoDraws(SameDraws):  # type: ignore[no-untyped-call]
    """Every draw is the middle of its distribution; a dropout keeps all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: set[str] = set()
        """operations that drew nevertheless: which constant would do is not known"""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One op."""
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        name = func._schema.name.removeprefix("aten::")
        given = _by_name(func, args, kwargs or {})
        if name == "native_dropout":
            return _undropped(made, given)
        if given.get("dropout_p") == 0.0:
            return made  # attention: it draws for dropout only
        middle = _MIDDLES.get(name)
        if middle is None:
            self.drawn.add(name)
            return made
        return made.copy_(middle(given)) if isinstance(made, Tensor) else made


def _by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**given, **dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}


def _undropped(made: tuple[Tensor, Tensor], given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A dropout that keeps all, scaled as its backward assumes."""
    if not given["train"] or not 0 < given["p"] < 1:
        return made
    return given["input"] / (1 - given["p"]), torch.ones_like(made[1])


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value)


def _likely(given: Mapping[str, Any]) -> Tensor:
    chance = given.get("p")
    return (_tensor(given["self"] if chance is None else chance) >= 0.5).float()


def _between(given: Mapping[str, Any]) -> Tensor:
    return torch.tensor((given["from"] + given["to"]) / 2)


_Middle = Callable[[Mapping[str, Any]], Tensor]
_HALF: _Middle = functools.partial(lambda value, given: torch.tensor(value), 0.5)
_ZERO: _Middle = functools.partial(lambda value, given: torch.tensor(value), 0.0)
_MIDDLES: dict[str, _Middle] = {
    "rand": _HALF,
    "rand_like": _HALF,
    "uniform_": _between,
    "uniform": _between,
    "randn": _ZERO,
    "randn_like": _ZERO,
    "normal_": lambda given: _tensor(given["mean"]),
    "normal": lambda given: _tensor(given["mean"]),
    "normal_functional": lambda given: _tensor(given["mean"]),
    "bernoulli": _likely,
    "bernoulli_": _likely,
    "randint": lambda given: torch.tensor(given.get("low") or 0),
    "randint_like": lambda given: torch.tensor(given.get("low") or 0),
    "exponential_": lambda given: torch.tensor(1 / given["lambd"]),
}
"""Operation -> the constant in place of its draws."""
