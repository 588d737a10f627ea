"""The script's own modules and their copies: while a copy runs, all that refers to the original gets the copy.

A script refers to its model, or to a loss with parameters, in more ways than by calling it: ``loss=`` adds a penalty
over ``model.parameters()``, a layer's forward is a closure over the layer's old forward, ``loss=`` reads an attribute
that forward has set. Varuna computes with copies, so all of these must lead to the copy.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_one_at_a_time = threading.RLock()
"""Workers that are threads may hold the same original."""


@contextmanager
def in_place_of(originals: nn.Module | None, copied: nn.Module) -> Iterator[None]:
    """Put modules and tensors of ``copied`` in the place of those of ``originals``, in this block.

    Args:
        originals: the script's own; None: there is none.
        copied: has modules of the same names.
    """
    if originals is None:
        yield
        return
    with _one_at_a_time:
        copies = _by_name(copied)
        pairs = [(each, copies[name]) for name, each in originals.named_modules()]
        tensors = {id(each): value for original, copy in pairs for each, value in _tensors(original, copy)}
        own = [vars(original) for original, _ in pairs]
        for original, copy in pairs:
            object.__setattr__(original, "__dict__", vars(copy))
        try:
            with _OtherTensors(tensors):
                yield
        finally:
            for (original, _), before in zip(pairs, own, strict=True):
                object.__setattr__(original, "__dict__", before)


def _by_name(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_modules(remove_duplicate=False))


def _tensors(original: nn.Module, copy: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for mine, others in ((original._parameters, copy._parameters), (original._buffers, copy._buffers)):
        for name, value in mine.items():
            if value is not None and (other := others.get(name)) is not None:
                yield value, other


class _OtherTensors(TorchFunctionMode):
    """Every call of torch with an original parameter or buffer gets that of the copy: of lists made before."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        args, kwargs = tree_map_only(Tensor, lambda value: self._others.get(id(value), value), (args, kwargs or {}))
        return func(*args, **kwargs)
