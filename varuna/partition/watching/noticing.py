"""Observations of ``forward`` while it is exported, which explain why it cannot be."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from varuna.partition.watching.explaining import ForwardFindings, Outside, user_line
from varuna.partition.watching.torch_versions import known_sizes

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class Noticing(TorchFunctionMode):
    """Fills ``noticed`` during one attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed = ForwardFindings()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        if func == _DATA and args[0].is_leaf and args[0].requires_grad:
            self.noticed.data_at = user_line()
        if torch.is_grad_enabled():
            for value in tree_leaves((args, kwargs)):
                if type(value) in (Tensor, nn.Parameter) and value.requires_grad:  # neither a fake nor without data
                    self._note(value)
        return func(*args, **(kwargs or {}))

    def _note(self, value: Tensor) -> None:
        address = value.untyped_storage().data_ptr()
        if address not in self.noticed.outside:
            self.noticed.outside[address] = Outside(value.is_leaf, tuple(value.shape), user_line())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notice also what is not a tensor operation, in this block."""
        environments: Any = ShapeEnv
        fix = environments._set_replacement

        def fixing(environment: ShapeEnv, symbol: Any, value: Any, *rest: Any, **how: Any) -> Any:
            if value.is_number and symbol in known_sizes(environment):
                self.noticed.fixed_at = self.noticed.fixed_at or user_line()
            return fix(environment, symbol, value, *rest, **how)

        environments._set_replacement = fixing
        try:
            with self:
                yield
        finally:
            environments._set_replacement = fix
