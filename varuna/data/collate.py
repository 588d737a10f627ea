"""From samples to a micro-batch: the default stacking, and a user's own ``collate``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.columns import Columns
from varuna.data.randomness import Draws, seeded
from varuna.data.sizes import SAMPLES

Sample = dict[str, Tensor]
CollateFunction = Callable[[list[Any]], Any]
"""From a list of samples to what can be named tensors: a dict, usually."""


def stack(samples: Sequence[Sample], indices: Sequence[int], keys: Iterable[str]) -> dict[str, Tensor]:
    """Stack ``keys`` of all samples along a new first dimension.

    Raises:
        DataError: a key is missing, or its shape or dtype differs between samples.
    """
    return {key: _stack_key(samples, indices, key) for key in keys}


def stack_all(samples: Sequence[Sample], indices: Sequence[int], columns: Columns) -> dict[str, Tensor]:
    """Stack every key that any sample has, but for those that do not fit together and that the model does not take.

    Raises:
        DataError: see ``stack``.
    """
    found: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        try:
            found[key] = _stack_key(samples, indices, key)
        except DataError:
            if columns.is_needed(key):
                raise
            columns.leave_out([key])
    return found


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


class Collator:
    """A user's ``collate``, called so that what it draws belongs to a sample, not to who shares its micro-batch."""

    def __init__(self, function: CollateFunction, columns: Columns, seed: int) -> None:
        self.function, self._columns, self._seed = function, columns, seed
        self._first: list[dict[str, Tensor]] | None = []
        """None: they have told"""
        self._reuses = False

    def batch(self, samples: Sequence[object], positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch that the function makes of samples.

        If it draws random numbers it is given the samples one by one, each with randomness of its own. Samples that
        are None are left out, by it.

        Raises:
            DataError: it returns something else than named tensors; or it draws, and they have no row for each sample.
        """
        batch, drew = self._call(samples, positions)
        if not drew or len(samples) == 1:
            return batch
        _check_rows(batch, len(samples))
        rows = [
            self._call([sample], [position])[0] for sample, position in zip(samples, positions, strict=True)
        ]  # fmt: skip
        return {key: _joined(key, [row.get(key) for row in rows]) for key in batch}

    def mixes(self, samples: Sequence[object], position: int) -> bool:
        """Return whether it draws, and what it makes of one sample changes with the others of the batch.

        Args:
            samples: three or more.
            position: of some sample: seeds draws.
        """
        alone, drew = zip(*(self._call([sample], [position]) for sample in samples), strict=True)
        if not any(drew) and not self._call(samples, [position])[1]:
            return False
        first, *others = _largest_first(samples, alone)
        pairs = [[[first, other] for other in others[:2]]] * _ATTEMPTS  # a permutation of two may be none
        return any(self._differ(pair, position, attempt) for attempt, pair in enumerate(pairs))

    def computes_over(self, samples: Sequence[object], position: int) -> bool:
        """Return whether what it makes of a sample changes with the others of the batch, drawn or not."""
        first, *others = _largest_first(samples, [self._call([sample], [position])[0] for sample in samples])
        return self._differ([[first, others[0]], [first, *others]], position, 0)

    def _differ(self, batches: Sequence[Sequence[object]], position: int, attempt: int) -> bool:
        """Return whether the first rows of two batches do."""
        one, two = (self._call(batch, [position, attempt])[0] for batch in batches)
        if SAMPLES in one or SAMPLES in two:
            return False  # they have no rows to be joined, which is refused
        return any(key in two and not _same(value[0], two[key][0]) for key, value in one.items())

    def _call(self, samples: Sequence[object], keys: Sequence[int]) -> tuple[dict[str, Tensor], bool]:
        """Call the function; return its batch, and whether it drew random numbers."""
        given = [_shallow_copy(sample) for sample in samples]  # it may add to them and take from them
        with seeded(self._seed, "collate", *keys):
            draws = Draws()
            try:
                found = self.function(given)
            except Exception as error:
                if texts := _texts(samples[0]):
                    error.add_note(
                        f"The samples that collate= was given also have columns of text ({', '.join(texts)}). If it "
                        "cannot take them, remove them, such as with dataset.remove_columns(...)."
                    )
                raise
            drew = draws.were_made
        batch = self._columns.without_idle_lists(self._columns.tensors(found, "what collate returns"))
        if not batch:
            raise DataError("collate= returns no tensors")
        there = sum(sample is not None for sample in samples)
        if any(value.dim() == 0 or value.shape[0] != there for value in batch.values()):
            batch[SAMPLES] = torch.tensor(there)
        return self._apart(batch), drew

    def _apart(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, copied if the function fills the same memory again: they are read ahead of their use.

        The first batches tell, which are kept so that nothing else gets their memory.
        """
        if self._first is None:
            return _copied(batch) if self._reuses else batch
        known = {_memory(value) for each in self._first for value in each.values()}
        self._reuses = any(_memory(value) in known for value in batch.values() if value.numel())
        told = self._reuses or len(self._first) + 1 == _LOOKED_AT
        self._first = None if told else [*self._first, batch]
        return _copied(batch)


_ATTEMPTS = 8
_LOOKED_AT = 4
"""First batches that are compared."""


def _copied(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in batch.items()}


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _check_rows(batch: dict[str, Tensor], size: int) -> None:
    for key, value in batch.items():
        if value.dim() == 0 or value.shape[0] != size:
            raise DataError(
                f"collate= draws random numbers, so it is given samples one by one, and their rows are joined: of "
                f"{size} samples the first dimension of each tensor must be {size}, but {key!r} has shape "
                f"{tuple(value.shape)}. Draw in dataset[i], which is seeded for each sample, and only join in collate=."
            )


def _joined(key: str, rows: Sequence[Tensor | None]) -> Tensor:
    """Join what samples became one by one into one tensor."""
    found = [row for row in rows if row is not None]
    if len(found) < len(rows) or len({(row.shape, row.dtype) for row in found}) > 1:
        shapes = ", ".join(sorted({"nothing" if row is None else str(tuple(row.shape[1:])) for row in rows}))
        raise DataError(
            f"collate= draws random numbers, so it is given samples one by one, and then makes {key!r} of different "
            f"shapes ({shapes}): what it draws for a sample must not depend on which samples share its micro-batch. "
            "Let it pad to a fixed length (for Hugging Face's collators: pad in the dataset with "
            "padding='max_length'), or draw in dataset[i], and only pad in collate=."
        )
    return torch.cat(found)


def select(batch: Mapping[str, Tensor], keys: Iterable[str] | None) -> dict[str, Tensor]:
    """Select the ``keys`` of a collated batch; None for all.

    Raises:
        DataError: one is missing.
    """
    wanted = list(batch) if keys is None else list(keys)
    missing = [key for key in wanted if key not in batch]
    if missing:
        raise DataError(f"the model needs {missing[0]!r}, but collate returned only {_names(batch)}")
    own = [SAMPLES] if SAMPLES in batch else []
    return {key: batch[key] for key in dict.fromkeys((*wanted, *own))}


def _shallow_copy(sample: object) -> object:
    """Copy a sample, but not its values: collators of Hugging Face pop keys, which a list of dicts would lose."""
    if type(sample) is dict:
        return dict(sample)
    return list(sample) if type(sample) is list else sample


def _largest_first(samples: Sequence[object], alone: Sequence[dict[str, Tensor]]) -> list[object]:
    """Order samples, with that first to which others are padded."""
    sizes = [sum(value.numel() for value in batch.values()) for batch in alone]
    order = sorted(range(len(samples)), key=lambda number: -sizes[number])
    return [samples[number] for number in order]


def _texts(sample: object) -> list[str]:
    if not isinstance(sample, Mapping):
        return []
    return [repr(key) for key, value in sample.items() if isinstance(value, str | bytes)]


def _same(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN here."""
    return one.shape == two.shape and bool(((one == two) | ((one != one) & (two != two))).all())


def _names(mapping: Mapping[str, object]) -> str:
    """Write the keys, for a message."""
    return ", ".join(map(repr, mapping)) or "nothing"
