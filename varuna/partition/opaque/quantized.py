"""Quantized layers with plain tensors for parameters: packed numbers and their scales, which are not trained.

Libraries hide scales from code that copies, sends or saves a model by its parameters: torchao and quanto in classes of
tensors, bitsandbytes in attributes. Here the layer's own code, or the same operations, computes with tensors that a
section can hold.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from varuna.core.errors import ModelError


def quantized_layers(model: nn.Module) -> list[str]:
    """Paths of layers whose parameters are not plain tensors."""
    return [path for path, module in model.named_modules() if _is_packed(module) or any(_wrapped(module))]


def quantized_by_function(layers: Sequence[str]) -> str:
    """Say what is wrong with a function that builds quantized layers: that needs values, and there are none yet."""
    return (
        f"model= is a function that builds a quantized model ({layers[0]} and {len(layers) - 1} more layers), but its "
        "layers cannot be quantized where tensors have shapes and no data. Pass the model that is built and quantized: "
        "model=model, with the optimizer over its parameters."
    )


def with_plain_tensors(model: nn.Module) -> None:
    """Give each quantized layer parameters that are plain tensors, with the same memory; it computes the same.

    Raises:
        ModelError: a layer is of a kind whose code cannot do with them.
    """
    for path, module in list(model.named_modules()):
        if _is_packed(module):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _Linear4Bit(module, path))
            continue
        for name in list(_wrapped(module)):
            if type(getattr(module, name)).__module__.startswith("optimum.quanto."):
                raise ModelError(
                    f"{path} is quantized by quanto, whose tensors cannot be captured. Quantize the base with torchao "
                    "(Int8WeightOnlyConfig, IntxWeightOnlyConfig), or with bitsandbytes in 4 bits."
                )
            parametrize.register_parametrization(module, name, _Assembled(), unsafe=True)


def _wrapped(module: nn.Module) -> Iterator[str]:
    """Names of the module's own parameters and buffers that consist of several tensors."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (name for name, value in own if is_traceable_wrapper_subclass(value))


def _is_packed(module: nn.Module) -> bool:
    """Return whether a layer is of bitsandbytes, which keeps more than its parameters say."""
    made = any(each.__module__.startswith("bitsandbytes.nn.") for each in type(module).__mro__)
    return made and any(type(value) is not nn.Parameter for value in module.parameters(recurse=False))


class _Assembled(nn.Module):
    """Makes a tensor of a library's class from its parts each time it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: Any = None

    def forward(self, *parts: Tensor) -> Tensor:
        """Put the whole tensor together."""
        return _assemble(self._plan, iter(parts))

    def right_inverse(self, whole: Tensor) -> list[Tensor]:
        """Take a whole tensor apart."""
        parts: list[Tensor] = []
        self._plan = _take_apart(whole, parts)
        return parts


def _take_apart(whole: Tensor, parts: list[Tensor]) -> Any:
    """Append the plain tensors that it consists of; return how to put them together."""
    if not is_traceable_wrapper_subclass(whole):
        parts.append(whole.detach())
        return None
    names, context = whole.__tensor_flatten__()
    inner = {name: _take_apart(getattr(whole, name), parts) for name in names}
    return type(whole), inner, context, whole.size(), whole.stride()


def _assemble(plan: Any, parts: Iterator[Tensor]) -> Tensor:
    if plan is None:
        return next(parts)
    kind, inner, context, size, stride = plan
    made = {name: _assemble(each, parts) for name, each in inner.items()}
    found: Tensor = kind.__tensor_unflatten__(made, context, size, stride)
    return found


class _Linear4Bit(nn.Module):
    """A module that computes as ``bitsandbytes.nn.Linear4bit`` with gradients, its scales among the parameters."""

    def __init__(self, layer: Any, path: str) -> None:
        super().__init__()
        state = getattr(layer.weight, "quant_state", None)
        kind = type(layer).__name__
        if not hasattr(layer, "compute_dtype") or state is None:
            raise ModelError(
                f"{path} is a {kind} of bitsandbytes, which cannot be trained over here: only its layers in 4 bits "
                "can, once they have been quantized. In 8 bits it exchanges its weights and scales during forward(). "
                "Load the base with load_in_4bit=True, or in 8 bits with torchao (Int8WeightOnlyConfig)."
            )
        if layer.compute_dtype not in (None, state.dtype):
            name, other = (str(dtype).removeprefix("torch.") for dtype in (state.dtype, layer.compute_dtype))
            raise ModelError(
                f"{path} was quantized from {name} and computes in {other}: bitsandbytes then rounds its weights in "
                "another way in the backward pass than in the forward pass, which is not reproduced here. Load the "
                f"base with bnb_4bit_compute_dtype=torch.{name}, or with dtype=torch.{other}."
            )
        self.dtype, self.kind = layer.compute_dtype, state.quant_type
        self.shape, self.block, self.nested_block = tuple(state.shape), state.blocksize, 0
        self.weight = _fixed(layer.weight.data)
        self.scales = _fixed(state.absmax)
        self.bias = layer.bias
        if state.nested:  # the scales are quantized, too
            self.nested_block = state.state2.blocksize
            self.nested_scales, self.nested_codes = _fixed(state.state2.absmax), _fixed(state.state2.code)
            self.offset = _fixed(state.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs [..., out] of inputs ``x`` [..., in]."""
        ops = torch.ops.bitsandbytes
        given = x if self.dtype is None else x.to(self.dtype)
        scales: Tensor = self.scales
        if self.nested_block:
            known = (scales, self.nested_scales, self.nested_codes, self.nested_block, torch.float32)
            scales = ops.dequantize_blockwise.default(*known) + self.offset
        packed = self.weight.view(-1, 1)
        weight = ops.dequantize_4bit.default(packed, scales, self.block, self.kind, self.shape, given.dtype)
        bias = None if self.bias is None else self.bias.to(given.dtype)
        return nn.functional.linear(given, weight, bias).to(x.dtype)


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)
