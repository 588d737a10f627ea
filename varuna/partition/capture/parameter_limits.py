"""``parameter.data.clamp_(...)`` in ``forward``: no change as long as nothing is beyond the limits, which is checked.

A graph cannot write to parameters. That all are within is a truth of the section that holds the parameter: a step in
which one is not is refused, not computed without the write.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.overrides import TorchFunctionMode

from varuna.partition.graph.captured import Truth
from varuna.partition.graph.operations import op_name
from varuna.partition.watching.explaining import user_line

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_LIMITING = (Tensor.clamp_, Tensor.clip_, Tensor.clamp_min_, Tensor.clamp_max_, torch.clamp_, torch.clip_)
LIMITED = "varuna: limited at "


class Limits(TorchFunctionMode):
    """Turns such a write of a captured model into an assertion."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._data: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, which the first tensor keeps; its parameter

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        given = dict(kwargs or {})
        if func == _DATA and args[0].is_leaf and args[0].requires_grad:
            found = func(*args)
            self._data[id(found)] = found, args[0]
            return found
        known = self._data.get(id(args[0])) if args else None
        if known is None or func not in _LIMITING:
            return func(*args, **given)
        value = known[1].detach()
        bound = {Tensor.clamp_min_: "min", Tensor.clamp_max_: "max"}.get(func)
        limits = {bound: args[1]} if bound and len(args) > 1 else given
        within = value.clamp(**limits) if bound else value.clamp(*args[1:], **limits)
        torch.ops.aten._assert_async.msg((within == value).all(), f"{LIMITED}{user_line() or 'an unknown line'}")
        self.count += 1
        return args[0]


def limits_of(graph: Graph) -> tuple[Truth, ...]:
    """The truths that a graph's assertions of this kind stand for."""
    found = []
    for node in graph.nodes:
        if op_name(node) == "aten::_assert_async" and str(node.args[-1]).startswith(LIMITED):
            place = str(node.args[-1]).removeprefix(LIMITED)
            found.append(Truth(node.args[0], f"{place} (a parameter that is beyond its limits is written there)"))
    return tuple(found)
