"""Deep copies of modules, also of those that hold what ``copy.deepcopy`` refuses."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varuna.partition.watching.own_code import TORCH

_MOST_SHARED = 64
_OWN_WAYS = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_COPIES = (Tensor.__deepcopy__, nn.Parameter.__deepcopy__)


def copied_whole(module: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A copy of a module and of all that it holds; what cannot be copied, such as a lock or a file, is shared.

    A module whose class copies it in a way that fails is copied attribute by attribute: ``__deepcopy__`` may build
    another one, and load values that there are none of now.

    Args:
        module: the original.
        memo: what stands for an object in the copy, by the object's identity.

    Raises:
        Exception: of something that can neither be copied nor be found.
    """
    shared: dict[int, Any] = {}
    plainly: list[nn.Module] = []
    while True:
        try:
            with _ByValue(module):
                return _copied(module, {**memo, **shared}, plainly)
        except Exception as error:
            own = _own_way(error)
            if own is not None and not any(own is each for each in plainly):
                plainly.append(own)
                continue
            found = _refused(error) if isinstance(error, TypeError) else None  # cannot pickle '_thread.lock' object
            if found is None or id(found) in shared or len(shared) == _MOST_SHARED:
                raise
            shared[id(found)] = found


def _copied(module: nn.Module, memo: dict[int, Any], plainly: Iterable[nn.Module]) -> nn.Module:
    # all in the memo before one is filled: they may refer to each other
    made = [(each, object.__new__(type(each))) for each in plainly]
    memo.update((id(each), new) for each, new in made)
    for each, new in made:
        vars(new).update(copy.deepcopy(vars(each), memo))
    return copy.deepcopy(module, memo)


def _own_way(error: BaseException) -> nn.Module | None:
    """The innermost module in whose class's own way to be copied something failed."""
    found, copied, trace = None, None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is copy.deepcopy.__code__:
            copied = trace.tb_frame.f_locals["x"]
        elif code.co_name in _OWN_WAYS and isinstance(copied, nn.Module) and not code.co_filename.startswith(TORCH):
            found = copied
        trace = trace.tb_next
    return found


def _refused(error: BaseException) -> Any:
    """The object at which ``copy.deepcopy`` failed; None if it failed elsewhere."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return None if isinstance(found, nn.Module | Tensor) else found


class _ByValue(TorchFunctionMode):
    """Copies tensors in plain attributes by their values, such as a weight that a hook computes anew in each forward.

    The copy of one that is computed from parameters, or lies in their memory, requires a gradient: if forward uses it
    as it is, capture refuses what would be a constant. Nothing trains a parameter in a plain list: its copy needs none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        own = (*(each for each in module.parameters() if each.requires_grad), *module.buffers())
        self._own = {value.untyped_storage().data_ptr() for value in own if value.layout is torch.strided} - {0}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        if func not in _COPIES or args[0].layout is not torch.strided:
            return func(*args, **(kwargs or {}))
        value, made = args
        if id(value) not in made:
            copied = value.detach().clone()
            if isinstance(value, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=False)
            elif value.is_floating_point():
                copied.requires_grad_(not value.is_leaf or value.untyped_storage().data_ptr() in self._own)
            made[id(value)] = copied
        return made[id(value)]
