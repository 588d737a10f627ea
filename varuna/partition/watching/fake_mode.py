"""Tensors that have shapes but no data, also when the user's code copies what it builds."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that is never copied: copies of its tensors are tensors of it, too.

    Constructors copy layers (``copy.deepcopy``, as ``nn.TransformerEncoder`` does), and torch copies with a fake tensor
    what that refers to: the mode and all it remembers. Among that are counted references to the memory of real tensors.
    Their copies count down without having counted up, so memory in use is freed when Python collects the copy.
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Copying(TorchFunctionMode):
    """Copies tensors without data by an operation, which can be recorded; torch copies their storage."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copied(*args)
        return func(*args, **(kwargs or {}))


def _copied(value: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(value) not in memo:
        made = value.detach().clone()
        is_parameter = isinstance(value, nn.Parameter)
        memo[id(value)] = nn.Parameter(made) if is_parameter else made
        memo[id(value)].requires_grad_(value.requires_grad)
    copied: Tensor = memo[id(value)]
    return copied
