"""The reference: a plain loop over whole batches. Neither this module nor what it imports knows Varuna."""

import inspect
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.field.catalogue import ways
from tests.field.jobs import (
    CLIP,
    GLOBAL_BATCH,
    MODEST_PARAMETERS,
    MOST_PARAMETERS,
    RATE,
    SEED,
    STEPS,
    Attempt,
    Prepared,
)

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


_SEEDS = 4


class CannotTrain(Exception):
    """Plain PyTorch does not train it either."""


NO_LOSS = "no scalar loss"
UNTRAINABLE = re.compile(
    f"{NO_LOSS}|[Tt]raining is not|(does|do) not support training|Tr?ain.* not supported|is not trainable|"
    "_forward_unimplemented"
)
"""Said of a model that computes, but nothing to learn from."""


@dataclass(frozen=True)
class Reference:
    """Results of plain PyTorch.

    Attributes:
        candidate: the way to make samples that worked.
        curve: of a run.
        noise: largest relative difference of another run whose first parameters were off by 3e-6.
        first_noise: the same of the first loss alone.
        draws: the same batch twice gives two losses.
    """

    candidate: int
    curve: Curve
    noise: float
    first_noise: float
    draws: bool
    parameters: int


def loss_of(output: Any) -> Tensor:
    """As users take it.

    Raises:
        CannotTrain: there is none.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if isinstance(output, dict) and found is None:
        found = output.get("loss")
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise CannotTrain(NO_LOSS)
    return found


def _loss(prepared: Prepared, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if prepared.loss is None:
        return loss_of(model(**batch))
    takes = inspect.signature(model.forward).parameters
    return prepared.loss(model(**{name: value for name, value in batch.items() if name in takes}), batch)


def batch_of(prepared: Prepared, indices: range) -> dict[str, Tensor]:
    """Samples, stacked."""
    samples = [prepared.dataset[index] for index in indices]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def train(prepared: Prepared, micro_batch: int | None, *, off: float = 0.0) -> Curve:
    """Losses and gradient norms; gradients accumulate over micro-batches where they are given."""
    torch.manual_seed(SEED)
    model = prepared.build().train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if off:
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(1 + off * torch.randn(parameter.shape, dtype=torch.float64)).float()
    optimizer = torch.optim.SGD(trained, lr=RATE)
    size = micro_batch or GLOBAL_BATCH
    curve: Curve = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for start in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH, size):
            loss = _loss(prepared, model, batch_of(prepared, range(start, start + size)))
            torch.autograd.backward(loss * size / GLOBAL_BATCH)
            total += float(loss.detach()) * size / GLOBAL_BATCH
        norm = _clipped(trained)
        optimizer.step()
        if not (math.isfinite(total) and math.isfinite(norm) and norm > 0):
            raise CannotTrain(f"loss {total}, gradient norm {norm} in step {step}")
        curve.append((total, norm))
    return curve


def _clipped(trained: list[nn.Parameter]) -> float:
    """The norm of all gradients, which are clipped to it.

    Of the sum of squares in fp64: in fp32, as ``clip_grad_norm_`` takes it, large tensors alone make it off by 1e-5.
    """
    norms = [parameter.grad.double().norm() for parameter in trained if parameter.grad is not None]
    norm = torch.stack(norms).norm()
    nn.utils.clip_grads_with_norm_(trained, CLIP, norm)
    return float(norm)


def difference(one: Curve, other: Curve) -> float:
    """Largest relative difference of losses and gradient norms."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


def _draws(prepared: Prepared) -> bool:
    """Whether any of several seeds moves the loss of a batch: a block that is dropped now and then is often kept."""
    torch.manual_seed(SEED)
    model = prepared.build().train()
    losses = []
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        losses.append(float(_loss(prepared, model, batch_of(prepared, range(GLOBAL_BATCH))).detach()))
    return max(losses) - min(losses) > 1e-6 * abs(losses[0])


def reference(attempt: Attempt) -> Reference:
    """Train with the first way to make samples that works.

    Raises:
        CannotTrain: none does; with the reason of the first.
    """
    reasons: list[str] = []
    larger: list[tuple[int, Prepared]] = []
    try:
        for number, prepared in enumerate(ways(attempt)):
            if attempt.candidate not in (None, number):
                continue
            if attempt.candidate is None and prepared.otherwise and any(map(UNTRAINABLE.search, reasons)):
                break
            if (found := _tried(number, prepared, attempt, MODEST_PARAMETERS, reasons, larger)) is not None:
                return found
    except Exception as error:
        reasons.append(_said(error))
    for number, prepared in larger:
        if (found := _tried(number, prepared, attempt, MOST_PARAMETERS, reasons, [])) is not None:
            return found
    raise CannotTrain(" | ".join(dict.fromkeys(reasons)) or "no way to make samples")


def _tried(
    number: int,
    prepared: Prepared,
    attempt: Attempt,
    most: int,
    reasons: list[str],
    larger: list[tuple[int, Prepared]],
) -> Reference | None:
    """None where it does not train, for a reason that is noted, or where it is left for later, since it is large."""
    try:
        parameters = sum(parameter.numel() for parameter in prepared.build().parameters())
        if parameters > most:
            larger.append((number, prepared))
            raise CannotTrain(f"{parameters / 1e6:.0f} million parameters: too large for a sweep")
        curve = train(prepared, attempt.micro_batch)
        moved = train(prepared, attempt.micro_batch, off=3e-6)
        first_noise = difference([(curve[0][0], 1.0)], [(moved[0][0], 1.0)])
        return Reference(number, curve, difference(curve, moved), first_noise, _draws(prepared), parameters)
    except Exception as error:
        reasons.append(_said(error))
        return None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {_brief(error)}"


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
