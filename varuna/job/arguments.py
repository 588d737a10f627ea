"""Arguments of a Trainer: their defaults, and checks that need nothing built."""

import operator
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from varuna.core.errors import UsageError
from varuna.core.model import LINKS
from varuna.core.precision import PRECISIONS, REDUCTIONS
from varuna.engine.base.wait_bounds import Patience


def check_arguments(
    global_batch: int,
    micro_batch: int | None,
    clip_grad_norm: float | None,
    cut_points: int | None,
    precision: str,
    reduction: str,
    links: str,
) -> None:
    """Refuse arguments that are wrong whatever the model is."""
    _check_whole(global_batch=global_batch, micro_batch=micro_batch, cut_points=cut_points)
    _check_number(clip_grad_norm=clip_grad_norm)
    if global_batch < 1:
        raise UsageError(f"global_batch={global_batch}: the number of examples per step must be at least 1")
    if micro_batch is not None and not 1 <= micro_batch <= global_batch:
        raise UsageError(
            f"micro_batch={micro_batch} must be between 1 and global_batch={global_batch}. Lower it, or leave it out."
        )
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UsageError(f"clip_grad_norm={clip_grad_norm} must be above 0; leave it out for no clipping")
    if cut_points is not None and cut_points < 1:
        raise UsageError(f"cut_points={cut_points} must be at least 1; leave it out to cut at every good place")
    if precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction={reduction!r} must be one of {', '.join(REDUCTIONS)}")
    if links not in LINKS:
        raise UsageError(f"links={links!r} must be one of {', '.join(LINKS)}")


def patience() -> Patience:
    """Of waits for other ranks; ``VARUNA_PATIENCE`` is how many seconds one piece of a rank's own work may take.

    Raises:
        UsageError: it is not a number above 0.
    """
    text = os.environ.get("VARUNA_PATIENCE")
    if text is None:
        return Patience()
    try:
        busy_s = float(text)
    except ValueError:
        busy_s = 0.0
    if not busy_s > 0:
        raise UsageError(f"VARUNA_PATIENCE={text!r} must be a number of seconds above 0, such as 7200")
    return Patience(busy_s=busy_s)


def check_functions(**functions: object) -> None:
    """Refuse what cannot be called as it will be: a built module builds nothing, torch's losses take no batch."""
    for name, found in functions.items():
        other = nn.modules.loss._Loss if name == "loss" else nn.Module
        if found is not None and (isinstance(found, other) or not callable(found)):
            raise UsageError(
                f"{name}= must be {_FUNCTIONS[name]}, because every worker calls it; it is {_described(found)}."
            )


_FUNCTIONS: Mapping[str, str] = {
    "model": "a function that builds the module, such as lambda: MyModel(config) or the class itself",
    "optimizer": "a function, such as lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)",
    "loss": "a function of the output and the batch, such as lambda output, batch: F.mse_loss(output, batch['y'])",
    "lr_scheduler": "a function, such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)",
}


def check_steps(n: int, *, started: bool) -> None:
    """Refuse an invalid number of steps, and a second loop."""
    _check_whole(n=n)
    if n < 0:
        raise UsageError(f"steps(n): n is the total number of steps of the run and must be >= 0 (got {n})")
    if started:
        raise UsageError("trainer.steps(n) can be called once. Build another Trainer for another run.")


def _check_whole(**numbers: Any) -> None:
    """Refuse text and fractions as counts: a script may have read them from its command line."""
    for name, found in numbers.items():
        try:
            operator.index(0 if found is None else found)
        except TypeError:
            raise UsageError(f"{name}={found!r} must be a whole number, but is {_described(found)}") from None


def _check_number(**numbers: object) -> None:
    for name, found in numbers.items():
        if isinstance(found, str) or not hasattr(0.0 if found is None else found, "__float__"):
            raise UsageError(f"{name}={found!r} must be a number, but is {_described(found)}")


def _described(found: object) -> str:
    return f"a {type(found).__name__}"


def check_normalisation(micro_batch: int | None, *, batch_dependent: bool) -> None:
    """Refuse batch normalisation without a micro-batch size from the user."""
    if batch_dependent and micro_batch is None:
        raise UsageError(
            "the model normalises over the examples of a micro-batch, so training depends on how many there are. "
            "Pass micro_batch= (the batch size per device that you would use in plain PyTorch); no plan changes "
            "it."
        )


def check_links(links: str, device: torch.device) -> None:
    """Refuse to train with links between GPUs on something else; looking at such a job needs none."""
    if links == "nccl" and device.type != "cuda":
        raise UsageError(
            f'links="nccl" connects GPUs, and this worker computes on {device}. Leave links= out, or start it where '
            "torch sees a GPU (torch.cuda.is_available())."
        )


def check_examples(examples: int | None, size: int | None) -> int:
    """The number of examples of a dataset to evaluate.

    Args:
        examples: asked for; None: all.
        size: of the dataset, if it has one.
    """
    count = size if examples is None else examples
    if count is None or count < 1 or (size is not None and count > size):
        raise UsageError(f"examples={examples}: the dataset has {size or 'no length'}. Say how many to use.")
    return count


def check_state(offload_optimizer: bool, shard_optimizer: bool, precision: str, *, sees_gradients: bool) -> None:
    """Refuse ``before_step`` where parameters and their gradients are apart, or fp32 parameters elsewhere."""
    if precision == "fp32" or not sees_gradients:
        return
    if shard_optimizer:
        raise UsageError(
            f"before_step= cannot be given with shard_optimizer=True and precision={precision!r}: most fp32 "
            "parameters are then on other replicas. Leave out one of the three."
        )
    if offload_optimizer:
        raise UsageError(
            f"before_step= cannot be given with offload_optimizer=True and precision={precision!r}: parameters are "
            "then in host memory and their gradients on the device. Leave out one of the three."
        )


def check_checkpoint_arguments(
    checkpoint_dir: object,
    checkpoint_every: int | timedelta | None,
    keep_last: int,
    keep_every: int | None,
    upload_bytes_per_s: float | None,
) -> None:
    """Refuse wrong arguments about checkpoints."""
    if not isinstance(checkpoint_every, timedelta):
        _check_whole(checkpoint_every=checkpoint_every)
    _check_whole(keep_last=keep_last, keep_every=keep_every)
    _check_number(upload_bytes_per_s=upload_bytes_per_s)
    if checkpoint_every is not None and checkpoint_dir is None:
        raise UsageError("checkpoint_every= needs checkpoint_dir=, the place to save to")
    every = checkpoint_every.total_seconds() if isinstance(checkpoint_every, timedelta) else checkpoint_every
    if every is not None and every <= 0:
        raise UsageError(f"checkpoint_every={checkpoint_every} must be above 0: steps (int) or a timedelta")
    if keep_last < 1:
        raise UsageError(f"keep_last={keep_last} must be at least 1: the newest checkpoint is always kept")
    if keep_every is not None and keep_every < 1:
        raise UsageError(f"keep_every={keep_every} must be at least 1 step; leave it out to keep only the newest")
    if upload_bytes_per_s is not None and not upload_bytes_per_s > 0:
        raise UsageError(f"upload_bytes_per_s={upload_bytes_per_s} must be above 0; leave it out for no limit")


def choose_device(requested: str | torch.device | None) -> torch.device:
    """Return the requested device, by default this worker's GPU if there is one; a GPU gets its number.

    Raises:
        UsageError: a GPU is requested, but torch sees none.
    """
    try:
        device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise UsageError(f"device={requested!r} is not a torch device: leave it out, or pass 'cuda' or 'cpu'") from None
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    number = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0")) % max(1, count)
    if number >= count:
        raise UsageError(
            f"device={str(requested)!r}: torch sees {count} GPUs here. Leave device= out to use what is available."
        )
    return torch.device("cuda", number)
