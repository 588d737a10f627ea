"""Batches whose first dimension is not the samples: rows of packed tokens, nodes and edges of graphs, boxes of images.

Such a batch has open sizes, which its samples tell. They are found by looking at some: dimensions that change with the
samples are open, and those that always change together are one size.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.errors import DataError

PREFIX = "varuna."
"""Prefix of keys that Varuna adds to a batch; no sample has such keys."""
SAMPLES = f"{PREFIX}samples"
"""Key of the number of samples of a batch, where the first dimension of its tensors is something else."""

_LEAST = 2
"""Of sizes for which a graph is captured: it would be another one for 0, and for 1."""
Place = tuple[str, int]
"""A key of the batch, and a dimension of its tensor."""


@dataclass(frozen=True)
class OpenSizes:
    """Sizes of a batch that its samples tell.

    Attributes:
        places: of each size: all dimensions that have it.
        per_sample: of each size: about how much of it a sample adds, for estimates of costs.
        samples: of every batch, if its keys depend on them: a list has an entry for each.
    """

    places: tuple[tuple[Place, ...], ...]
    per_sample: tuple[float, ...]
    samples: int | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a batch that tell all sizes."""
        return tuple(dict.fromkeys(places[0][0] for places in self.places))

    def of(self, batch: Mapping[str, Tensor], indices: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the sizes of a batch.

        Args:
            batch: with ``keys`` at least.
            indices: of its samples in the dataset, for the message.

        Raises:
            DataError: dimensions differ that should be equal.
        """
        found: list[int] = []
        for places in self.places:
            known = {(key, dim): batch[key].shape[dim] for key, dim in places if key in batch}
            if len(set(known.values())) != 1:
                each = ", ".join(f"dimension {dim} of {key!r} is {size}" for (key, dim), size in known.items())
                raise DataError(
                    f"in the batch of dataset indices {list(indices)}, {each or 'a size cannot be told'}, but in the "
                    "first samples these were equal, and the model was captured so. Let collate= make them equal, or "
                    "pad to a size of their own."
                )
            found.append(next(iter(known.values())))
        return tuple(found)


def samples_in(batch: Mapping[str, Tensor]) -> int:
    """Count the samples that were there when a batch was made; a batch of none counts nothing."""
    return int(batch[SAMPLES]) if SAMPLES in batch else rows_in(batch)


def rows_in(batch: Mapping[str, Tensor]) -> int:
    """Return the number of rows of a batch's tensors; with open sizes nothing follows from it."""
    value = next(iter(batch.values()))
    return value.size(0) if value.dim() else 1


def has_rows(batch: Mapping[str, Tensor], rows: int) -> bool:
    """Return whether each tensor has that many rows."""
    return all(value.dim() and value.size(0) == rows for value in of_samples(batch).values())


def of_samples(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without keys of Varuna's own."""
    return {key: value for key, value in batch.items() if not key.startswith(PREFIX)}


Seen = Sequence[tuple[int, Mapping[str, Tensor]]]
"""Batches, each with the number of samples that were read for it."""


def is_listed(seen: Seen) -> bool:
    """Return whether batches have the more keys the more samples they have."""
    return len({len(of_samples(batch)) for _, batch in seen}) == len(seen)


_NUMBER = re.compile(r"\[(\d+)\]")


def lists_in(seen: Seen) -> frozenset[str]:
    """Find the lists that have an entry for each sample: their keys without its number, as ``targets[]['boxes']``."""
    found: dict[str, bool] = {}
    for _, batch in seen:
        numbers: dict[str, set[int]] = {}
        for key in batch:
            for name, number in _entries(key):
                numbers.setdefault(name, set()).add(number)
        wanted = set(range(samples_in(batch) or 1))
        for name, mine in numbers.items():
            found[name] = found.get(name, True) and mine == wanted
    return frozenset(name for name, fits in found.items() if fits)


def _entries(key: str) -> list[tuple[str, int]]:
    """List the ways to take a key as that of an entry of a list: the key without its number, and the number."""
    return [(f"{key[: at.start()]}[]{key[at.end() :]}", int(at[1])) for at in _NUMBER.finditer(key)]


class _Sizes(NamedTuple):
    """The sizes of a dimension in some batches; dimensions of equal ones are one size."""

    rows: tuple[tuple[int, ...], ...]
    """of each batch: one number, or that of each entry of a list whose entries have sizes of their own"""
    entry: int | None
    """its number in such a list"""


def open_sizes(seen: Seen, *, lists: Collection[str] | None = None) -> OpenSizes | None:
    """Find the open sizes of batches of several numbers of samples.

    None: every tensor has one row for each sample that is there; some may be None, and left out.

    Args:
        seen: some batches.
        lists: those with an entry for each sample (``lists_in``). Any sample may come to any place of a list, so what
            differs at one is open at all. The number of samples is the same in all batches; None: keys do not depend
            on it.

    Raises:
        DataError: they have unlike keys, dtypes or numbers of dimensions, or nothing in them changes.
    """
    there = [samples_in(batch) for _, batch in seen]
    batches = [of_samples(batch) for _, batch in seen]
    if lists is None and all(has_rows(batch, samples or 1) for batch, samples in zip(batches, there, strict=True)):
        return None
    _check_alike(batches)
    columns: dict[_Sizes, list[Place]] = {}
    for keys in _alike_entries(batches[0], lists or ()):
        for dim in range(batches[0][keys[0]].dim()):
            rows = tuple(tuple(batch[key].shape[dim] for key in keys) for batch in batches)
            is_one = all(len(set(row)) == 1 for row in rows)
            for entry, key in enumerate(keys):
                sizes = _Sizes(tuple(row[:1] for row in rows), None) if is_one else _Sizes(rows, entry)
                columns.setdefault(sizes, []).append((key, dim))
    # A dimension that is the same in all batches is fixed.
    found = {sizes: tuple(places) for sizes, places in columns.items() if len(set(itertools.chain(*sizes.rows))) > 1}
    if not found and lists is None:
        raise DataError(
            "collate= makes batches of the same shapes whatever the number of samples, so nothing in them tells how "
            "many there are. Let it return one row for each sample."
        )
    most = max(count for count, _ in seen)
    largest = [
        max(max(row) for row, (count, _) in zip(sizes.rows, seen, strict=True) if count == most) for sizes in found
    ]
    samples = None if lists is None else most
    return OpenSizes(tuple(found.values()), tuple(size / most for size in largest), samples)


def _alike_entries(batch: Mapping[str, Tensor], lists: Collection[str]) -> list[list[str]]:
    """Group keys of a batch: those that differ in a sample's number only, together and in its order."""
    found: dict[str, dict[int, str]] = {}
    for key in batch:
        name, number = next((entry for entry in _entries(key) if entry[0] in lists), (key, 0))
        found.setdefault(name, {})[number] = key
    return [[keys[number] for number in sorted(keys)] for keys in found.values()]


def equal_sizes(batch: Mapping[str, Tensor], sizes: OpenSizes) -> int:
    """Count the open sizes of a batch that a graph might take for another one, or for a fixed one."""
    opened = {place for places in sizes.places for place in places}
    fixed = {value.shape[dim] for key, value in batch.items() for dim in range(value.dim()) if (key, dim) not in opened}
    found = sizes.of(batch)
    return sum(size in fixed or size < _LEAST or found.count(size) > 1 for size in found)


def told_apart(batch: Mapping[str, Tensor], sizes: OpenSizes) -> dict[str, Tensor]:
    """Make a batch no two of whose open sizes are equal, nor one to a fixed size: elements are repeated for that."""
    opened = {place for places in sizes.places for place in places}
    taken = {value.shape[dim] for key, value in batch.items() for dim in range(value.dim()) if (key, dim) not in opened}
    taken |= set(range(_LEAST))
    made = dict(batch)
    for places in sizes.places:
        [size] = {batch[key].shape[dim] for key, dim in places}
        wanted = next(each for each in itertools.count(size) if each not in taken)
        taken.add(wanted)
        for key, dim in places:
            made[key] = _repeated(made[key], dim, wanted)
    return made


def _repeated(value: Tensor, dim: int, size: int) -> Tensor:
    own = value.shape[dim]
    if not own:
        return value.new_zeros([size if each == dim else other for each, other in enumerate(value.shape)])
    return value.index_select(dim, torch.arange(size) % own)


def _check_alike(batches: Sequence[Mapping[str, Tensor]]) -> None:
    first = {key: (value.dtype, value.dim()) for key, value in batches[0].items()}
    for batch in batches[1:]:
        other = {key: (value.dtype, value.dim()) for key, value in batch.items()}
        if other != first:
            odd = next(key for key in {**first, **other} if first.get(key) != other.get(key))
            raise DataError(
                f"what collate= returns has another form for other samples: {odd!r} is {_form(first.get(odd))}, then "
                f"{_form(other.get(odd))}. Let it return the same keys, dtypes and numbers of dimensions for any."
            )


def _form(told: tuple[torch.dtype, int] | None) -> str:
    return "missing" if told is None else f"{told[0]} with {told[1]} dimensions"
