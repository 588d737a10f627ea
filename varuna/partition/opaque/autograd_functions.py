"""``torch.autograd.Function`` in a captured graph: one op each, so that its own backward is what runs.

Export records only what a Function's forward does; differentiating that again would silently lose a backward
written by hand (BLOOM's GELU, RecurrentGemma's bounded square root, straight-through estimators).
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from varuna.core.errors import ModelError
from varuna.partition.opaque.met import met

NAMESPACE = "varuna_functions"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # lives as the process does
_apply: Any = torch.autograd.Function.__dict__["apply"]
"""A class method, of C from torch 2.14 on."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def apply_of_torch(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """``function.apply`` as torch has it."""
    return _apply.__get__(None, function)(*args, **kwargs)


@contextmanager
def plain_functions() -> Iterator[None]:
    """Apply autograd Functions as torch does, in the middle of ``kept_functions``."""
    kept = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = kept  # type: ignore[method-assign]


@dataclass
class _Call:
    """A Function with everything that it is called with but tensors and symbolic sizes."""

    function: type[torch.autograd.Function]
    arguments: TreeSpec
    leaves: list[Any]
    """constants; ``Tensor`` or ``torch.SymInt`` (the class) where one is given with each call"""
    results: TreeSpec | None = None
    result_leaves: tuple[Any, ...] = ()

    def run(self, tensors: list[Tensor], sizes: list[Any]) -> list[Tensor]:
        given = {Tensor: iter(tensors), torch.SymInt: iter(sizes)}
        leaves = [next(given[leaf]) if leaf in (Tensor, torch.SymInt) else leaf for leaf in self.leaves]
        before = [tensor._version for tensor in tensors]
        results = apply_of_torch(self.function, *tree_unflatten(leaves, self.arguments))
        if [tensor._version for tensor in tensors] != before:
            raise ModelError(f"{self.function.__qualname__} writes its arguments in place: return new tensors instead.")
        found, self.results = tree_flatten(results)
        self.result_leaves = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in found)
        # an operation of a graph may return a view of its argument, not the argument itself
        return [leaf.view_as(leaf) if any(leaf is t for t in tensors) else leaf for leaf in found if _is_tensor(leaf)]


_calls: dict[str, _Call] = {}


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def kept_functions() -> Iterator[None]:
    """Let calls of a model's own autograd Functions become ops of the graph that is exported."""

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _as_called(*args)
        if cls.__module__.partition(".")[0] == "torch" or kwargs:
            return apply_of_torch(cls, *args, **kwargs)
        return _as_op(cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = _apply  # type: ignore[method-assign]


def _as_called(run: Callable[..., Any], _preserves_randomness: bool, *args: Any) -> Any:
    """Call ``run`` as ``checkpoint(run, *args, use_reentrant=True)`` would: Varuna recomputes by itself.

    As there, nothing within learns if no argument does: ``CheckpointFunction`` would run it without a graph and, as
    nothing leads back to it, never again with one.
    """
    learns = any(isinstance(each, Tensor) and each.requires_grad for each in args)
    with nullcontext() if learns else torch.no_grad():
        return run(*args)


def _as_op(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    found, spec = tree_flatten(args)
    leaves: list[Any] = [
        Tensor if isinstance(leaf, Tensor) else torch.SymInt if isinstance(leaf, torch.SymInt) else leaf
        for leaf in found
    ]
    odd = next((leaf for leaf in leaves if leaf not in (Tensor, torch.SymInt) and not isinstance(leaf, _PLAIN)), None)
    if odd is not None:
        raise ModelError(
            f"{function.__qualname__}.apply gets a {type(odd).__name__}: Varuna captures calls of autograd "
            "Functions only with tensors, numbers, strings, dtypes and devices. Pass what it needs as tensors."
        )
    met()
    name = _name_of(function, spec, leaves)
    call = _calls.get(name)
    if call is None:
        # torch keeps a kernel for good, so it looks its call up: a later capture may put another one there
        kernel = lambda tensors, sizes: _calls[name].run(tensors, sizes)  # noqa: E731
        _library.define(f"{name}(Tensor[] tensors, SymInt[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]
        _library.impl(name, kernel, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    if call is None or call.function is not function:
        call = _calls[name] = _Call(function, spec, leaves)
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    sizes = [leaf for leaf in found if isinstance(leaf, torch.SymInt)]
    made = iter(getattr(getattr(torch.ops, NAMESPACE), name)(tensors, sizes))
    assert call.results is not None
    return tree_unflatten([next(made) if leaf is Tensor else leaf for leaf in call.result_leaves], call.results)


def _name_of(function: type[torch.autograd.Function], spec: TreeSpec, leaves: list[Any]) -> str:
    """The op's name, the same in every process, since it is part of the section's digest."""
    what = (function.__module__, function.__qualname__, str(spec), repr(leaves))
    return f"{function.__name__.lower()}_{hashlib.sha256(repr(what).encode()).hexdigest()[:12]}"
