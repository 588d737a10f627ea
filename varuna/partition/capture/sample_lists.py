"""Lists of a tensor's samples that are put together again: ``torch.cat(list(features))``, as vision-language models do.

A graph for any number of samples cannot make a list of them: two elements stand for all (``opaque.each_sample``).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from varuna.partition.opaque.each_sample import LOOPS, LoopsOverSamplesError, counts_of, listed

_UNBIND = (torch.unbind, Tensor.unbind)
_SPLIT = (torch.split, Tensor.split)


class ListedSamples(TorchFunctionMode):
    """While a model is captured, the number of samples stays open where a list is made of them."""

    def __init__(self, value_of: Callable[[Tensor], Tensor | None]) -> None:
        """Prepare.

        Args:
            value_of: a tensor's value for the first samples; None if it is unknown.
        """
        super().__init__()
        self._value_of = value_of
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
            return listed(args[0])
        if (
            func in _SPLIT
            and (counts := counts_of(args[1])) is not None
            and {0} >= {*args[2:], *(kwargs or {}).values()}
        ):
            return self._split(args[0], counts)
        return func(*args, **(kwargs or {}))

    def _split(self, whole: Tensor, counts: Tensor) -> Any:
        """A list with the rows that belong to each sample, if all samples have as many as the first ones have.

        Raises:
            LoopsOverSamplesError: they do not.
        """
        known = self._value_of(counts)
        each = int(known[0]) if known is not None and len(known) else 0
        if known is None or each < 1 or not bool((counts == each).all()):  # a branch, which every batch must take
            raise LoopsOverSamplesError(LOOPS)
        samples = counts.shape[0]
        torch._check(whole.shape[0] == samples * each)  # type: ignore[no-untyped-call]
        return listed(whole.reshape(samples, each, *whole.shape[1:]))


def _is_open(value: object) -> bool:
    """Whether the number of elements along the first dimension is unknown."""
    size = value.shape[0] if isinstance(value, Tensor) and value.dim() else 0
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number
