"""Random numbers that ``forward`` takes care of itself, which a graph would lose: seeds, states, generators."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from varuna.core.errors import ModelError
from varuna.partition.watching.explaining import user_line
from varuna.partition.watching.own_code import OWN

_SEEDS: tuple[tuple[Any, str], ...] = (
    *((place, name) for place in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")),
    (torch.random, "fork_rng"),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")),
)


class OwnDrawsError(ModelError):
    """``forward`` seeds, or draws from a generator of its own."""

    def __init__(self, what: str) -> None:
        where = user_line()
        super().__init__(
            f"the model cannot be captured: forward() {what}{f' at {where}' if where else ''}. Varuna seeds each "
            "operation by the step and the micro-batch, so that a recompute and every plan draw the same. For numbers "
            "that shall be the same each time, draw them in the constructor, from a generator as here, and keep them "
            "with self.register_buffer(name, values). For new ones in each step, draw with torch.rand or torch.randn "
            "and no generator; for some of each sample's own, draw in dataset[i]."
        )


@contextmanager
def refused_seeds() -> Iterator[None]:
    """Refuse, while a model is captured, what sets the state of torch's generators, and draws from others."""
    before = [getattr(place, name) for place, name in _SEEDS]
    for place, name in _SEEDS:
        setattr(place, name, _refusing(getattr(place, name), f"calls {place.__name__}.{name}()"))
    try:
        with _Generators():
            yield
    finally:
        for (place, name), function in zip(_SEEDS, before, strict=True):
            setattr(place, name, function)


def _refusing(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    capturing = threading.get_ident()  # other workers may be other threads

    def call(*args: Any, **kwargs: Any) -> Any:
        is_own = sys._getframe(1).f_code.co_filename.startswith(OWN)
        if is_own or threading.get_ident() != capturing:
            return original(*args, **kwargs)
        raise OwnDrawsError(what)

    return call


class _Generators(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator is not torch.default_generator:
            raise OwnDrawsError(f"draws from a generator of its own (torch.{func.__name__}(..., generator=))")
        return func(*args, **(kwargs or {}))
