"""Python loops over the places where a mask is true, such as the experts that got a token."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FOUND = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_LEFT_AS_IS = (Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten)


class MaskLoopUnroller(TorchFunctionMode):
    """Lets ``for i in mask.nonzero():`` of a captured model visit every index of the vector ``mask``.

    How many are true depends on data, so export cannot unroll the loop; how many there are does not. What a loop does
    for a place that is not true must be nothing: an expert without tokens adds nothing. Capture notes that it relied
    on this (``visited``), and the captured model is compared with the loops as written before a run begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, tuple[Tensor, int]] = {}  # by identity; the tensor is kept, so that it stays unique
        self.visited = False
        self.added = 0  # places visited that are not true, where that is known

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        given = dict(kwargs or {})
        first = args[0] if args else None
        if func is Tensor.__format__ and first is not None and first.dim() == 0:
            return format(first.item(), *args[1:])  # names of experts: a fake tensor would print itself
        if isinstance(first, Tensor):
            known = self._places.get(id(first))
            if known is not None and func in (Tensor.unbind, torch.unbind):
                self._visit(first, known[1])
                return tuple(_index(place, first.dim()) for place in range(known[1]))
            if known is not None and func is Tensor.tolist:
                self._visit(first, known[1])
                return [[place] for place in range(known[1])] if first.dim() > 1 else list(range(known[1]))
            result = func(*args, **given)
            if func in _FOUND and isinstance(result, Tensor) and first.dim() == 1 and isinstance(first.shape[0], int):
                self._places[id(result)] = (result, first.shape[0])
            elif known is not None and func in _LEFT_AS_IS and isinstance(result, Tensor):
                self._places[id(result)] = (result, known[1])
            return result
        return func(*args, **given)

    def _visit(self, places: Tensor, count: int) -> None:
        self.visited = True
        if isinstance(places.shape[0], int):
            self.added += count - places.shape[0]


def _index(place: int, dimensions: int) -> Tensor:
    """One row of the result of ``nonzero``; a number if the row's dimension was squeezed."""
    return torch.tensor([place] if dimensions > 1 else place)
