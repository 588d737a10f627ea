"""Deep copies of modules, also of those that hold what ``copy.deepcopy`` refuses."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MOST_SHARED = 64


def copied_whole(module: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A copy of a module and of all that it holds; what cannot be copied, such as a lock or a file, is shared.

    Args:
        module: the original.
        memo: what stands for an object in the copy, by the object's identity.

    Raises:
        Exception: of something that can neither be copied nor be found.
    """
    shared: dict[int, Any] = {}
    while True:
        try:
            with _Computed():
                return copy.deepcopy(module, {**memo, **shared})
        except TypeError as error:  # cannot pickle '_thread.lock' object
            found = _refused(error)
            if found is None or id(found) in shared or len(shared) == _MOST_SHARED:
                raise
            shared[id(found)] = found


def _refused(error: BaseException) -> Any:
    """The object at which ``copy.deepcopy`` failed; None if it failed elsewhere."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return None if isinstance(found, nn.Module | Tensor) else found


class _Computed(TorchFunctionMode):
    """Copies a tensor that was computed by its value, as a weight that a hook computes anew before each forward.

    The copy requires a gradient, too: if forward uses it as it is, capture refuses what would be a constant.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        value, made = args
        if id(value) not in made:
            made[id(value)] = value.detach().clone().requires_grad_()
        return made[id(value)]
