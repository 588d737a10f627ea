"""Adapters of PEFT over a model, and a reference without them in the same forward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from varuna.core.errors import UsageError
from varuna.membership.launched import watch_exceptions


def adapted(model: nn.Module, adapter: Any) -> Any:
    """Return the model with adapters.

    Args:
        model: of transformers or diffusers; it is changed.
        adapter: a ``LoraConfig``, or another one of PEFT's.

    Raises:
        UsageError: the adapters match no module.
    """
    import peft

    watch_exceptions()
    try:
        return peft.get_peft_model(model, adapter)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        check_matched(error, adapter, linear)
        raise


def check_matched(error: ValueError, adapter: Any, linear: set[str] | None = None) -> None:
    """Refuse adapters that match no module, if that is what PEFT says.

    Args:
        error: PEFT's.
        adapter: what was asked for.
        linear: names of the model's linear layers, if they are known.

    Raises:
        UsageError: it is.
    """
    if adapter is None or "target modules" not in str(error).lower().replace("_", " "):
        return
    named = f" Its linear layers are called {', '.join(sorted(linear))}." if linear else ""
    raise UsageError(
        f"the adapters match no module of the model: target_modules={adapter.target_modules!r}.{named} "
        "target_modules='all-linear' takes all linear layers but the head."
    ) from error


def beside_base(model: nn.Module, rows: int) -> nn.Module:
    """Have one forward compute each example with LoRA's adapters, and once more without them.

    Of what the model is given, (examples, rows, ...) becomes (examples x 2 x rows, ...): the rows of an example with
    adapters, then the same ones without. Its labels are left to the loss.

    Args:
        model: with adapters, which get forward hooks.
        rows: of an example.

    Returns:
        The model.

    Raises:
        UsageError: the adapters are no plain LoRA, so what they add cannot be told from the rest.
    """

    def twice(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        return given, {name: doubled(value) for name, value in named.items() if name != "labels"}

    off_in_second_half(model, rows)
    model.register_forward_pre_hook(twice, with_kwargs=True)
    return model


def doubled(value: Tensor) -> Tensor:
    """Repeat [examples, rows, ...] as [examples x 2 x rows, ...]."""
    return torch.cat([value, value], 1).flatten(0, 1)


def off_in_second_half(model: nn.Module, rows: int) -> list[RemovableHandle]:
    """Switch LoRA's adapters off in the second half of the rows of each example.

    Args:
        model: with adapters.
        rows: in each half.

    Returns:
        The hooks that do it.

    Raises:
        UsageError: as for ``beside_base``.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    if not layers or any(not isinstance(each, LoraLayer) or each.lora_magnitude_vector for each in layers):
        kinds = ", ".join(sorted({type(each).__name__ for each in layers}))
        raise UsageError(
            f"only adapters of plain LoRA can be switched off in some rows; found {kinds or 'none'}. Use LoraConfig "
            "without use_dora."
        )

    def switched(module: nn.Module, given: Any, added: Tensor) -> Tensor:
        first, _ = added.unflatten(0, (-1, 2, rows)).unbind(1)  # type: ignore[no-untyped-call]
        return torch.stack([first, torch.zeros_like(first)], 1).flatten(0, 2)

    return [second.register_forward_hook(switched) for each in layers for second in each.lora_B.values()]
