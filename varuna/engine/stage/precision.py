"""Computing in bf16 or fp16 over fp32 parameters: what is cast, and when.

The parameters that the optimizer updates, their state, and the sums of gradients are fp32. What the sections compute
with is a copy in the compute dtype, as ``model.to(dtype)`` would make it (parameters and floating buffers; no
autocast), written anew after each optimizer step.
"""

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from varuna.core.precision import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in the compute dtype, if it is floating; fp32 runs leave every dtype as the model has it."""
    return value.to(dtype) if is_cast(value, dtype) else value


def is_cast(value: Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``cast`` changes ``value``."""
    return dtype is not torch.float32 and value.is_floating_point() and value.dtype is not dtype


def unit_near(weight: float) -> float:
    """Return the power of two next to the weight of a global batch: fp16 gradients are divided by it."""
    return 2.0 ** round(math.log2(weight))


class ComputeCopies:
    """Values that sections compute with, by parameter: the parameters themselves, or copies in the compute dtype."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        *,
        resting: Container[str] = (),
    ) -> None:
        """Make the copies, but for parameters that are ``resting`` in host memory, as they are computed with."""
        own = dtype is torch.float32  # each has the dtype that the model gives it
        found = (value.dtype for value in parameters.values() if value.is_floating_point())
        self._is_copy = not own and any(each is not dtype for each in found)
        self._copies: dict[str, Tensor] = (
            {
                name: cast(value.detach().to(device), dtype).requires_grad_(value.requires_grad)
                if value.dtype is not dtype and name not in resting
                else value
                for name, value in parameters.items()
            }
            if self._is_copy
            else dict(parameters)
        )

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor that sections are given."""
        return self._copies[name]

    def refresh(self, written: Mapping[str, Tensor]) -> None:
        """Renew the copies of parameters that the optimizer has changed."""
        if not self._is_copy:
            return
        pairs = [(self._copies[name], value) for name, value in written.items() if self._copies[name] is not value]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in pairs], [value for _, value in pairs])


class HalfGradients:
    """Gradients of parameters that the model has in half precision, in an fp32 run: fp32 sums, rounded once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor]) -> None:
        self._sums = sums
        self._halves = {
            name: parameters[name] for name, total in sums.items() if parameters[name].dtype.itemsize < total.itemsize
        }

    def show(self) -> None:
        """Give the optimizer what it expects: gradients of the parameters' dtype."""
        for name, parameter in self._halves.items():
            parameter.grad = self._sums[name].to(parameter.dtype)

    def hide(self) -> None:
        """Hide the gradients again, so that no backward adds to them."""
        for parameter in self._halves.values():
            parameter.grad = None
