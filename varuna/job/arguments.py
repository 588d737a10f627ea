"""Checks of single arguments that need nothing built, and how options are written."""

import operator
import os
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch

from varuna.core.errors import UsageError

_FUNCTIONS: Mapping[str, str] = {
    "model": "a torch module, or a function that builds one, such as lambda: MyModel(config) or the class itself",
    "optimizer": "a torch optimizer over the model's parameters, or a function that builds one, such as "
    "lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)",
    "loss": "one of torch's loss modules, or a function of the output and the batch, such as "
    "lambda output, batch: F.mse_loss(output, batch['y'])",
    "lr_scheduler": "a torch scheduler, or a function that builds one, such as "
    "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)",
    "metrics": "a function of the output and the batch that returns a dict of sums, such as {'right': right.sum()}",
    "weight": "a function of the batch, such as lambda batch: batch['mask'].sum()",
    "collate": "a function from a list of samples to a dict of tensors",
    "batch_ramp": "a function of the step that returns its number of examples, such as "
    "lambda step: min(512, 64 * (1 + step // 100))",
    "frozen": "a function of a parameter's name and the step, such as "
    "lambda name, step: name.startswith('backbone.') and step < 1000",
    "before_step": "a function of the (name, parameter) list and, if it has a parameter of that name, of the step",
    "after_step": "a function of two dicts by name, of parameters and of buffers, and, if it wants it, of the step",
}
_GIVEN: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "optimizer": ("list of (name, parameter)",),
    "loss": ("output", "batch"),
    "lr_scheduler": ("optimizer",),
    "metrics": ("output", "batch"),
    "weight": ("batch",),
    "collate": ("list of samples",),
    "batch_ramp": ("step",),
    "frozen": ("name", "step"),
    "before_step": ("list of (name, parameter)",),
    "after_step": ("parameters", "buffers"),
}
"""Arguments that each of them is called with."""
_MORE: Mapping[str, tuple[str, ...]] = {"before_step": ("step",), "after_step": ("step",)}
"""Arguments that it is called with besides, if it takes them."""

WRITTEN_ELSEWHERE: Mapping[str, str] = {
    "batch_size": "global_batch=..., the examples of one optimizer step over all workers",
    "rampup_batch_size": "batch_ramp=..., a function of the step",
    "criterion": "loss=...",
    "collate_fn": "collate=...",
    "max_grad_norm": "clip_grad_norm=...",
    "checkpoint_dir": 'checkpoints="..."',
    "checkpoint_every": "checkpoints=varuna.Checkpoints(path, every=...)",
    "keep_last": "checkpoints=varuna.Checkpoints(path, keep_last=...)",
    "keep_every": "checkpoints=varuna.Checkpoints(path, keep_every=...)",
    "upload_bytes_per_s": "checkpoints=varuna.Checkpoints(path, upload_bytes_per_s=...)",
    "cut_points": "cut=... with the number of cut-points",
    "cut_at": "cut=[...] with the names of modules",
    "weight": "loss=varuna.Loss(..., weight=...)",
    "weights_missing": 'weights=varuna.Weights(path, missing="initialise")',
    "ignore_mismatched_sizes": 'weights=varuna.Weights(path, missing="initialise")',
    "per_micro_batch": "loss=varuna.Loss(..., per_micro_batch=True)",
    "lengths": "collate=varuna.Collate(..., lengths=[...])",
    "offload_optimizer": "memory=varuna.Memory(offload_optimizer=True)",
    "shard_optimizer": "memory=varuna.Memory(shard_optimizer=True)",
    "stream_frozen": "memory=varuna.Memory(stream_frozen=True)",
    "links": "network=varuna.Network(links=...)",
    "reduction": "network=varuna.Network(reduction=...)",
}
"""Options that a person may look for at the Trainer itself, and how they are written."""


def refuse_unknown(unknown: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Refuse keywords that a Trainer does not take, with how the option is written.

    Args:
        unknown: the keywords that are none of its own.
        known: its own.

    Raises:
        UsageError: there are such keywords.
    """
    for name in unknown:
        near = get_close_matches(name, known, 1)
        remedy = WRITTEN_ELSEWHERE.get(name) or (f"{near[0]}=" if near else f"some of {', '.join(known)}")
        raise UsageError(f"Trainer() has no argument {name}=. Pass {remedy}.")


def check_function(name: str, found: object) -> None:
    """Refuse what cannot be called, or not with what it will be called with."""
    if found is None:
        return
    if not callable(found):
        raise UsageError(f"{name}= must be {_FUNCTIONS[name]}; it is {described(found)}.")
    try:
        taken = signature(found)
    except (TypeError, ValueError):  # some functions that are written in C do not say
        return
    if name in _MORE:
        with suppress(TypeError):
            taken.bind(*_GIVEN[name], *_MORE[name])
            return
    try:
        taken.bind(*_GIVEN[name])
    except TypeError as error:
        given = ", ".join(f"the {each}" for each in _GIVEN[name]) or "nothing"
        raise UsageError(
            f"{name}= is called with {given}, which it does not take ({error}). It must be {_FUNCTIONS[name]}."
        ) from None


def check_kind(name: str, kind: type, found: object) -> None:
    """Refuse another value than one of Varuna's own."""
    if not isinstance(found, kind):
        raise UsageError(f"{name}={found!r} must be a varuna.{kind.__name__}(...), but is {described(found)}")


def check_whole(**numbers: Any) -> None:
    """Refuse text and fractions as counts: a script may have read them from its command line."""
    for name, found in numbers.items():
        try:
            operator.index(0 if found is None else found)
        except TypeError:
            raise UsageError(f"{name}={found!r} must be a whole number, but is {described(found)}") from None


def check_number(**numbers: object) -> None:
    """Refuse text as a number."""
    for name, found in numbers.items():
        if isinstance(found, str) or not hasattr(0.0 if found is None else found, "__float__"):
            raise UsageError(f"{name}={found!r} must be a number, but is {described(found)}")


def described(found: object) -> str:
    """Name the kind of a value, for a message."""
    return f"a {type(found).__name__}"


def choose_device(requested: str | torch.device | None = None) -> torch.device:
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
