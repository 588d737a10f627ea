"""Samples of any usual form become dicts of tensors, named as the model's inputs.

What a sample becomes follows from the sample and the model's signature alone, never from samples read before: every
process makes the same of it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.nest import in_list, root, spread
from varuna.process.console import say_once

_LABELS = "labels"
TARGETS = frozenset(("target", "targets", "label", "labels"))
"""Names that loss modules of torch and of others, such as timm's, give to what they compare the output with."""
_TARGETS_OF_MODELS = TARGETS | {"tgt", "y"}
"""Names that models give to the optional parameter that they compare with."""
STEP = "step"
"""The column that the run supplies where the samples lack it: the number of the step, for each example."""
_LABEL = "label"
"""Name of the column, in Hugging Face's datasets, that its models take as ``labels``."""


@dataclasses.dataclass(frozen=True)
class InputNames:
    """Names of the inputs that a model's ``forward`` takes."""

    model: str
    """name of the model's class"""
    order: tuple[str, ...]
    """its parameters that can be passed by position, in order"""
    named: frozenset[str]
    """all its parameters that can be passed by name"""
    takes_any: bool = False
    """it takes other names too (``**kwargs``)"""
    read_apart: bool = False
    """functions of the user's (``loss=``, ``metrics=``, a weight) may read other keys of the batch"""
    required: frozenset[str] = frozenset()
    """those of ``named`` without a default"""
    needed: int | None = None
    """number of those in ``order`` without a default, if ``loss=`` computes the loss and ``forward`` needs no labels"""


class Columns:
    """Turns samples into dicts of tensors."""

    def __init__(self, names: Callable[[], InputNames] | None = None) -> None:
        """Ask nothing yet.

        Args:
            names: builds the model without data; asked once, and only if samples need it. None: samples must be dicts
                of what can be a tensor.
        """
        self._ask = names

    @cached_property
    def names(self) -> InputNames | None:
        """Names of the inputs of ``forward``, if they can be known."""
        return None if self._ask is None else self._ask()

    def tensors(self, sample: object, what: str) -> dict[str, Tensor]:
        """Turn a sample, or what ``collate`` made of several, into named tensors; those of a nest by their places.

        A list of tensors is a nest also if they have equal shapes: those of other samples may not.

        Args:
            sample: a dict, tuple, dataclass, tensor, array, number or list.
            what: it is, for messages, such as ``dataset[3]``.

        Raises:
            DataError: it has another form, or what ``forward`` takes cannot be a tensor.
        """
        fields = spread(self._fields(sample, what), _is_leaf)
        found = {key: tensor_of(value) for key, value in fields.items()}
        if all(value is not None for value in found.values()) and not _is_label_renamed(found):
            return {key: value for key, value in found.items() if value is not None}
        names = self.names
        if names is None:
            raise _not_a_tensor(what, fields, [key for key, value in found.items() if value is None])
        if _is_label_renamed(found) and _LABELS in names.named and _LABEL not in names.named:
            found = {_LABELS if key == _LABEL else key: value for key, value in found.items()}
            fields = {_LABELS if key == _LABEL else key: value for key, value in fields.items()}
            say_once(f"{names.model}.forward() takes 'labels': the samples' 'label' is passed as that")
        keeps_others = names.takes_any or names.read_apart
        kept = [key for key in found if root(key) in names.named or (keeps_others and found[key] is not None)]
        if missing := [key for key in kept if found[key] is None]:
            raise _not_a_tensor(what, fields, missing)
        self.leave_out({root(key): None for key in found if key not in kept})
        return {key: value for key in kept if (value := found[key]) is not None}

    def is_needed(self, key: str) -> bool:
        """Return whether ``forward`` takes a key, or something of the user's may read it."""
        names = self.names
        return names is None or names.takes_any or names.read_apart or root(key) in names.named

    def without_idle_lists(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leave lists out that the model does not take: how many keys they have may depend on the samples."""
        idle = [key for key in batch if in_list(key) and not self.is_needed(key)]
        self.leave_out({root(key): None for key in idle})
        return {key: value for key, value in batch.items() if key not in idle}

    def leave_out(self, keys: Iterable[str]) -> None:
        """Say, once, that columns are not used."""
        left, names = sorted(keys), self.names
        if left and names is not None:
            listed = ", ".join(map(repr, left))
            say_once(f"samples also have {listed}, which {names.model}.forward() does not take: not used")

    def _fields(self, sample: Any, what: str) -> Mapping[str, object]:
        """Return the values of a sample, by name."""
        if isinstance(sample, Mapping):
            if odd := [key for key in sample if not isinstance(key, str)]:
                raise DataError(f"{what} must have the model's input names as keys, but has the key {odd[0]!r}")
            return sample
        if isinstance(sample, tuple) and hasattr(sample, "_fields"):
            return dict(zip(sample._fields, sample, strict=True))
        if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
            return {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        if isinstance(sample, tuple) or (
            isinstance(sample, list) and any(isinstance(each, Tensor | np.ndarray) for each in sample)
        ):
            return self._by_position(sample, what)
        if tensor_of(sample) is None:
            raise DataError(
                f"{what} must be a dict with the model's input names as keys, a tuple in the order of forward's "
                f"parameters, or a tensor, array or number, but is a {type(sample).__name__}. Convert it in the "
                "dataset, or pass collate=, a function that makes a dict of tensors of a list of samples."
            )
        return self._by_position((sample,), what)

    def _by_position(self, values: Sequence[object], what: str) -> Mapping[str, object]:
        names = self.names
        if names is None or not names.order:
            model = "the model" if names is None else f"{names.model}.forward()"
            raise DataError(
                f"{what} is a {type(values).__name__} of {len(values)}, and {model} does not tell the names of its "
                "parameters. Return a dict with the names of the model's inputs as keys."
            )
        order = names.order
        if _LABELS not in order:
            if len(values) == len(order) + 1 and names.read_apart:
                order = (*order, _LABELS)
            elif (
                len(values) - 1 == names.needed and order[names.needed] not in _TARGETS_OF_MODELS
            ):  # ``mask=None`` is no target
                order = (*order[: names.needed], _LABELS)
        if len(values) > len(order):
            raise DataError(
                f"{what} has {len(values)} values, but {names.model}.forward() takes {', '.join(names.order)}. If the "
                "last one is for the loss, pass loss=, such as loss=torch.nn.CrossEntropyLoss(): it is then "
                f"batch['{_LABELS}']. Otherwise return a dict with the names of the model's inputs as keys."
            )
        taken = order[: len(values)]
        if len(taken) > 1:
            say_once(f"samples have no names: their values are taken as {', '.join(taken)}, in this order")
        return dict(zip(taken, values, strict=True))


def _is_leaf(value: object) -> bool:
    """Return whether it is no nest: lists of numbers are one tensor, and if they are unequal, none."""
    return not isinstance(value, Mapping) and not _holds_tensors(value)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensors(each) for each in value)
    return isinstance(value, Tensor | np.ndarray | Mapping)


def tensor_of(value: object) -> Tensor | None:
    """Make a dense tensor with the same values; None if it cannot be one.

    Arrays and tensors keep their dtype, but 16- and 32-bit unsigned arrays become int64, since torch computes nothing
    with such. Python's floats become float32.
    """
    if isinstance(value, Tensor):
        return value if value.layout == torch.strided else None
    if isinstance(value, np.ndarray | np.generic):
        return _of_array(np.asarray(value))
    if isinstance(value, bool | int | float | complex):
        return _of_numbers(value)
    if not isinstance(value, list | tuple):
        return None
    return None if _holds_tensors(value) else _of_numbers(value)


def _of_array(value: np.ndarray[Any, Any]) -> Tensor | None:
    if value.dtype.kind not in "biufc":
        return None
    if value.dtype.kind == "u" and value.dtype.itemsize in (2, 4):
        value = value.astype(np.int64)
    try:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    except TypeError:  # float128 and the like
        return None


def _of_numbers(value: object) -> Tensor | None:
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # strings, None, ragged lists, whole numbers too large
        return None


def _is_label_renamed(found: Mapping[str, object]) -> bool:
    return _LABEL in found and _LABELS not in found


_IF_NONE = (
    "Leave the key out of every sample: forward() then takes its default, and reads keys of a dict inside by get()."
)
_IF_OTHER = "Convert it in the dataset, or pass collate=, a function that makes a dict of tensors of a list of samples."


def _not_a_tensor(what: str, fields: Mapping[str, object], keys: Sequence[str]) -> DataError:
    key = keys[0]
    value, name = fields[key], root(key)
    place = f"[{name!r}]{key.removeprefix(name)}"
    kind = f"{value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__
    ragged = " of unequal lists or of something else than numbers" if isinstance(value, list | tuple) else ""
    advice = _IF_NONE if value is None else _IF_OTHER
    return DataError(
        f"{what}{place} must be a dense tensor, an array, a number or a list of numbers, but is a {kind}{ragged}. "
        f"{advice}"
    )
