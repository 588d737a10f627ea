"""Side effects of user code: hooks on gradients, draws from Python and NumPy.

A captured graph has neither: no hook is called, and what was drawn once holds for the whole run.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils import checkpoint as _checkpoint

from varuna.partition.watching.own_code import OWN

_PYTHON = {
    name: each for name, each in vars(random).items() if getattr(each, "__self__", None) is getattr(random, "_inst", 0)
}
_NUMPY = {
    name: each
    for name, each in vars(np.random).items()
    if type(getattr(each, "__self__", None)).__name__ == "RandomState" and name not in ("get_state", "set_state")
}
_STATES = ("getstate", "setstate", "seed", "get_state", "set_state")

Respond = Callable[[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""(name, original, arguments) -> what a function of ``random`` or ``numpy.random`` returns"""


@dataclass
class Seen:
    """Side effects that were seen while user code ran."""

    hooks: list[str] = field(default_factory=list)
    """hooks on gradients, and where they were registered"""
    draws: list[str] = field(default_factory=list)
    """owners of generators that moved, and the place if that is known"""
    reentrant: list[str] = field(default_factory=list)
    """places of calls of ``torch.utils.checkpoint`` with ``use_reentrant=True``"""


@contextmanager
def watched(respond: Respond | None = None) -> Iterator[Seen]:
    """Note hooks, draws and reentrant checkpoints; the generators are put back.

    Args:
        respond: what functions of ``random`` and ``numpy.random`` return in here; default: what they do.
    """
    seen = Seen()
    python, numpy_ = random.getstate(), np.random.get_state(legacy=False)
    places: list[str] = []
    with _patched(_hooking(seen)), _patched(_drawing(places, respond)), _patched(_checkpointing(seen)):
        try:
            yield seen
        finally:
            moved = [
                name
                for name, is_moved in (
                    ("Python's random", random.getstate() != python),
                    ("NumPy's random", _differ(np.random.get_state(legacy=False), numpy_)),
                )
                if is_moved
            ]
            random.setstate(python)
            np.random.set_state(numpy_)
            where = f" at {', '.join(dict.fromkeys(places))}" if places else ""
            seen.draws.extend(f"{name}{where}" for name in moved)


def _differ(one: Any, two: Any) -> bool:
    """Return whether two states of NumPy's Mersenne twister differ."""
    keys = np.array_equal(one["state"]["key"], two["state"]["key"])
    return not keys or one["state"]["pos"] != two["state"]["pos"] or one["has_gauss"] != two["has_gauss"]


def gradient_hooks(module: nn.Module) -> list[str]:
    """Hooks on gradients that parameters and modules have."""
    found = []
    for name, value in module.named_parameters():
        if value._backward_hooks:
            found.append(f"Parameter.register_hook on {name}")
        if getattr(value, "_post_accumulate_grad_hooks", None):
            found.append(f"register_post_accumulate_grad_hook on {name}")
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            found.append(f"register_full_backward_hook on {name or type(each).__name__}")
    if _module._global_backward_hooks or _module._global_backward_pre_hooks:
        found.append("register_module_full_backward_hook")
    return found


def user_place() -> str | None:
    """``file:line`` of the nearest caller outside torch and Varuna."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*OWN, "<")) and not name.endswith(("/contextlib.py", "/functools.py", "/random.py")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


_Patch = tuple[Any, str, Any]
"""(owner, attribute, value)"""


@contextmanager
def _patched(patches: Iterable[_Patch]) -> Iterator[None]:
    originals = []
    try:
        for owner, name, value in patches:
            originals.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)


def _hooking(seen: Seen) -> Iterator[_Patch]:
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield Tensor, name, _noting(vars(Tensor)[name], seen.hooks, f"Tensor.{name}")


def _checkpointing(seen: Seen) -> Iterator[_Patch]:
    original = _checkpoint.CheckpointFunction.forward
    yield (
        _checkpoint.CheckpointFunction,
        "forward",
        staticmethod(_noting(original, seen.reentrant, "torch.utils.checkpoint")),
    )


def _noting(original: Callable[..., Any], notes: list[str], what: str) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        place = user_place()
        text = f"{what} at {place}" if place else what
        if text not in notes:
            notes.append(text)
        return original(*args, **kwargs)

    return called


def _drawing(places: list[str], respond: Respond | None) -> Iterator[_Patch]:
    for owner, functions in ((random, _PYTHON), (np.random, _NUMPY)):
        for name, original in functions.items():
            if name not in _STATES:
                yield owner, name, _answering(name, original, places, respond)


def _answering(
    name: str, original: Callable[..., Any], places: list[str], respond: Respond | None
) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        place = user_place()
        if place and place not in places:
            places.append(place)
        return original(*args, **kwargs) if respond is None else respond(name, original, args, kwargs)

    return called
