"""Dtypes that a model's parameters may have, so that none is changed silently.

In fp32 runs each parameter keeps the dtype that the model gives it, bf16 and fp16 included: a frozen base in bf16 under
adapters in fp32 computes as it does in plain PyTorch. With ``precision=`` all are computed with in that precision.
"""

import torch
from torch import nn

from varuna.core.errors import ModelError

HALVES = frozenset({torch.bfloat16, torch.float16})
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse parameters that a run would keep in another dtype than the model has.

    Args:
        model: as its constructor made it.
        dtype: of computation. Half precision casts all parameters, as ``model.to(dtype)`` does.

    Raises:
        ModelError: names the first such parameter, and says what to do.
    """
    for name, parameter in model.named_parameters():
        found = parameter.dtype
        if found.is_complex:
            _check_complex(name, found, dtype)
        elif found.is_floating_point and found not in ({torch.float32, dtype} | _kept(dtype)):
            count = sum(each.dtype is found for each in model.parameters())
            raise ModelError(
                f"the parameter {name} of the model is {_text(found)} ({count} of its parameters are), but a run keeps "
                f"such parameters in float32 and computes in the precision= of Trainer, here {_text(dtype)}. "
                f"{_way_out(found)}"
            )


def _kept(dtype: torch.dtype) -> frozenset[torch.dtype]:
    return HALVES if dtype is torch.float32 else frozenset()


def _check_complex(name: str, found: torch.dtype, dtype: torch.dtype) -> None:
    if found is not torch.complex64:
        raise ModelError(
            f"the parameter {name} of the model is {_text(found)}; complex parameters train as complex64. Build it "
            "with dtype=torch.complex64."
        )
    if dtype is not torch.float32:
        raise ModelError(
            f"the parameter {name} of the model is complex, and {_text(dtype)} has no complex numbers. Leave "
            "precision= out."
        )


def _way_out(found: torch.dtype) -> str:
    if found in _PRECISIONS:
        return (
            f'Pass precision="{_PRECISIONS[found]}" to compute in {_text(found)} over float32 parameters, leave '
            "precision= out to keep each parameter as it is, or build the model in float32."
        )
    return (
        "Build the model in float32, without .double() or dtype=, and let the dataset return floating values in "
        "float32."
    )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
