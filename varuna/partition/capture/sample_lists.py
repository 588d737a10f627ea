"""Lists of a tensor's samples that are put together again: ``torch.cat(list(features))``, as vision-language models do.

A graph for any number of samples cannot make a list of them. One element stands for all, and whatever is done to it but
to put it together with the others, which are not there, is refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_UNBIND = (torch.unbind, Tensor.unbind)
_LOOPS = "forward() loops over the samples"
_CAT = (torch.cat, torch.concat, torch.concatenate)


class LoopsOverSamplesError(Exception):
    """A model computes something for each sample by itself, in a loop."""


class AllSamples:
    """Stands for every element of ``list(whole)``."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put the elements together; nothing else can be done to them."""
        given = dict(kwargs or {})
        listed = args[0] if args else given.pop("tensors", None)
        dim = args[1] if len(args) > 1 else given.pop("dim", 0)
        is_alone = isinstance(listed, (list, tuple)) and len(listed) == 1 and isinstance(listed[0], cls)
        if is_alone and dim == 0 and not given:
            whole: Tensor = listed[0]._whole
            if func is torch.stack:
                return whole
            if func in _CAT and whole.dim() > 1:
                return whole.flatten(0, 1)
        raise LoopsOverSamplesError(_LOOPS)

    def __getattr__(self, name: str) -> NoReturn:
        raise LoopsOverSamplesError(_LOOPS)


class ListedSamples(TorchFunctionMode):
    """While a model is captured, the number of samples stays open where a list is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        if func is Tensor.__len__ and _is_open(args[0]):
            self.used = True
            raise TypeError(_LOOPS)  # ``list`` asks how long it will be, and does without an answer
        if func in _UNBIND and not kwargs and args[1:] in ((), (0,)) and _is_open(args[0]):
            self.used = True
            return (AllSamples(args[0]),)
        return func(*args, **(kwargs or {}))


def _is_open(value: object) -> bool:
    """Whether the number of elements along the first dimension is unknown."""
    size = value.shape[0] if isinstance(value, Tensor) and value.dim() else 0
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number
