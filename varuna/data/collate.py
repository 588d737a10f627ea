"""From samples to a micro-batch: the default stacking, and the check of what a user's ``collate`` returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from varuna.core.errors import DataError

Sample = dict[str, Tensor]
CollateFunction = Callable[[list[Sample]], Mapping[str, Tensor]]


def stack(samples: Sequence[Sample], indices: Sequence[int], keys: Iterable[str]) -> dict[str, Tensor]:
    """Stack ``keys`` of all samples along a new first dimension.

    Raises:
        DataError: a key is missing, or its shape or dtype differs between samples.
    """
    return {key: _stack_key(samples, indices, key) for key in keys}


def _stack_key(samples: Sequence[Sample], indices: Sequence[int], key: str) -> Tensor:
    """Stack the tensors of one key along a new first dimension.

    Raises:
        DataError: see ``stack``.
    """
    for sample, index in zip(samples, indices, strict=True):
        if key not in sample:
            raise DataError(f"dataset[{index}] has no {key!r}, only {_names(sample)}. All samples need the same keys.")
        found, first = sample[key], samples[0][key]
        if found.shape != first.shape:
            raise DataError(
                f"{key!r} has shape {tuple(first.shape)} in dataset[{indices[0]}] but {tuple(found.shape)} in "
                f"dataset[{index}]: samples of different shapes cannot be stacked. Pad them in the dataset, or pass "
                f"collate= with a function that pads a list of samples."
            )
        if found.dtype != first.dtype:
            raise DataError(
                f"{key!r} is {first.dtype} in dataset[{indices[0]}] but {found.dtype} in dataset[{index}]. "
                f"Convert it in the dataset, so that all samples agree."
            )
    return torch.stack([sample[key] for sample in samples])


def check_collated(batch: object, size: int, keys: Iterable[str] | None) -> dict[str, Tensor]:
    """Check what a user's ``collate`` returned, and restrict it to ``keys`` if given.

    Args:
        batch: what it returned.
        size: number of samples that it was given.
        keys: inputs that are needed; None for all.

    Raises:
        DataError: it is not a dict of tensors whose first dimension is ``size``, or lacks a key.
    """
    if not isinstance(batch, Mapping):
        raise DataError(f"collate must return a dict of tensors, but returned {type(batch).__name__}")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise DataError(f"collate must return a dict of tensors, but {key!r} is {type(value).__name__}")
        if value.dim() == 0 or value.shape[0] != size:
            raise DataError(
                f"collate was given {size} samples, so the first dimension of each tensor must be {size}, "
                f"but {key!r} has shape {tuple(value.shape)}"
            )
    wanted = list(batch) if keys is None else list(keys)
    missing = [key for key in wanted if key not in batch]
    if missing:
        raise DataError(f"the model needs {missing[0]!r}, but collate returned only {_names(batch)}")
    return {key: batch[key] for key in wanted}


def _names(mapping: Mapping[str, object]) -> str:
    """The keys, for a message."""
    return ", ".join(map(repr, mapping)) or "nothing"
