"""Lists of a tensor's samples that are put together again: ``torch.cat(list(features))``, as vision-language models do.

A graph for any number of samples cannot make a list of them: one element stands for all (``opaque.each_sample``).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varuna.partition.opaque.each_sample import LOOPS, AllSamples

_UNBIND = (torch.unbind, Tensor.unbind)


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
            raise TypeError(LOOPS)  # ``list`` asks how long it will be, and does without an answer
        if func in _UNBIND and not kwargs and args[1:] in ((), (0,)) and _is_open(args[0]):
            self.used = True
            return (AllSamples(args[0]),)
        return func(*args, **(kwargs or {}))


def _is_open(value: object) -> bool:
    """Whether the number of elements along the first dimension is unknown."""
    size = value.shape[0] if isinstance(value, Tensor) and value.dim() else 0
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number
