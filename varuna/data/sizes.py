"""Batches whose first dimension is not the samples: rows of packed tokens, nodes and edges of graphs, boxes of images.

Such a batch has open sizes, which its samples tell. They are found by looking at some: dimensions that change with the
samples are open, and those that always change together are one size.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.core.errors import DataError

PREFIX = "varuna."
"""Prefix of keys that Varuna adds to a batch; no sample has such keys."""
SAMPLES = f"{PREFIX}samples"
"""Key of the number of samples of a batch, where the first dimension of its tensors is something else."""

Place = tuple[str, int]
"""A key of the batch, and a dimension of its tensor."""


@dataclass(frozen=True)
class OpenSizes:
    """Sizes of a batch that its samples tell.

    Attributes:
        places: of each size: all dimensions that have it.
        per_sample: of each size: about how much of it a sample adds, for estimates of costs.
        rows: the only one is the first dimension of all tensors: the samples that are there, of those that were read.
    """

    places: tuple[tuple[Place, ...], ...]
    per_sample: tuple[float, ...]
    rows: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a batch that tell all sizes."""
        return tuple(dict.fromkeys(places[0][0] for places in self.places))

    def of(self, batch: Mapping[str, Tensor], indices: Sequence[int] = ()) -> tuple[int, ...]:
        """The sizes of a batch.

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
    """How many samples a batch has."""
    return int(batch[SAMPLES]) if SAMPLES in batch else len(next(iter(batch.values())))


def rows_in(batch: Mapping[str, Tensor]) -> int:
    """How many rows its tensors have; with open sizes nothing asks for it."""
    value = next(iter(batch.values()))
    return len(value) if value.dim() else 1


def of_samples(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch without keys of Varuna's own."""
    return {key: value for key, value in batch.items() if not key.startswith(PREFIX)}


def open_sizes(batches: Iterable[tuple[int, Mapping[str, Tensor]]], *, may_miss: bool = False) -> OpenSizes | None:
    """Find the open sizes of batches of several numbers of samples.

    None: every tensor has one row for each sample that was read.

    Args:
        batches: the number of samples that were read for each, and what they became.
        may_miss: samples may be left out, though none of these are.

    Raises:
        DataError: they have unlike keys, dtypes or numbers of dimensions, or nothing in them changes.
    """
    seen = [(count, samples_in(batch), of_samples(batch)) for count, batch in batches]
    has_rows = all(
        value.dim() and len(value) == (samples or 1) for _, samples, batch in seen for value in batch.values()
    )
    if has_rows:
        if not may_miss and all(count == samples for count, samples, _ in seen):
            return None
        share = sum(samples for _, samples, _ in seen) / sum(count for count, _, _ in seen)
        return OpenSizes((tuple((key, 0) for key in seen[0][2]),), (share,), rows=True)
    _check_alike([batch for _, _, batch in seen])
    columns: dict[tuple[int, ...], list[Place]] = {}
    for key, value in seen[0][2].items():
        for dim in range(value.dim()):
            columns.setdefault(tuple(batch[key].shape[dim] for _, _, batch in seen), []).append((key, dim))
    found = {sizes: places for sizes, places in columns.items() if len(set(sizes)) > 1}
    if not found:
        raise DataError(
            "collate= makes batches of the same shapes whatever the number of samples, so nothing in them tells how "
            "many there are. Let it return one row for each sample."
        )
    most = max(count for count, _, _ in seen)
    of_most = [i for i, (count, _, _) in enumerate(seen) if count == most]
    return OpenSizes(
        tuple(map(tuple, found.values())), tuple(max(sizes[i] for i in of_most) / most for sizes in found)
    )


def told_apart(batch: Mapping[str, Tensor], sizes: OpenSizes) -> dict[str, Tensor]:
    """A batch no two of whose open sizes are equal to each other or to a fixed size: elements are repeated for that."""
    opened = {place for places in sizes.places for place in places}
    taken = {value.shape[dim] for key, value in batch.items() for dim in range(value.dim()) if (key, dim) not in opened}
    taken |= {0, 1}
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
