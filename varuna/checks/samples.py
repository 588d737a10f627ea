"""Samples that a job is checked on: of the first ones, those that differ in their masks and labels."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.digests import tensors_digest
from varuna.data.samples import LOOKED_AT, MicroBatch, SampleSource
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel

_IGNORED = -100
"""The label that cross-entropy ignores."""

_Signature = tuple[tuple[str, float, float], ...]


def choose_positions(model: PartitionedModel, source: SampleSource, count: int) -> tuple[tuple[int, ...], ...]:
    """Positions to check on, one group for each declared length that occurs; up to ``count`` in each.

    Raises:
        DataError: a sample cannot be read, or has a length that was not declared.
    """
    groups: dict[int, dict[int, _Signature]] = {}
    for position in range(LOOKED_AT if source.size is None else min(LOOKED_AT, source.size)):
        batch = source.micro_batch([position])
        variant = variant_of(model, batch.tensors, batch.indices)
        groups.setdefault(variant, {})[position] = _signature(batch.tensors)
        if len(groups) == len(model.graphs) and all(len(set(each.values())) >= count for each in groups.values()):
            break
    return tuple(_choose_unlike(each, count) for each in groups.values())


def _choose_unlike(signatures: dict[int, _Signature], count: int) -> tuple[int, ...]:
    """Up to ``count`` positions, of as many different signatures as there are, in order."""
    first: dict[_Signature, int] = {}
    for position, found in signatures.items():
        first.setdefault(found, position)
    chosen = [*first.values(), *(position for position in signatures if position not in first.values())]
    return tuple(sorted(chosen[:count]))


def _signature(batch: dict[str, Tensor]) -> _Signature:
    """Count the zero and the ignored entries of each key: masks, padding and ignored labels show in them."""
    return tuple(
        (key, float((value == 0).sum()), 0.0 if value.dtype is torch.bool else float((value == _IGNORED).sum()))
        for key, value in sorted(batch.items())
    )


def read_twice(source: SampleSource, positions: Sequence[int]) -> MicroBatch:
    """The samples as a batch.

    Raises:
        DataError: reading them again gives others, or ``collate`` draws random numbers and mixes them.
    """
    one, two = source.micro_batch(list(positions)), source.micro_batch(list(positions))
    if tensors_digest(one.tensors) != tensors_digest(two.tensors):  # by the bit: one process rounds in one way
        pairs = zip(one.indices, one.digests, two.digests, strict=True)
        refuse_random(source, positions, next((i for i, first, second in pairs if first != second), one.indices[0]))
    return one


def refuse_random(source: SampleSource, positions: Sequence[int], index: int) -> NoReturn:
    """Refuse samples of which ``index`` is another one when it is read again.

    Raises:
        DataError: always.
    """
    what = (
        f"the dataset is random: reading dataset[{index}] twice gave two different samples. Workers read "
        "the same sample again, so it must depend on the index and on"
        if source.collates_alike(positions)
        else f"collate= is random: it made something else of the same samples (dataset indices "
        f"{list(source.indices(positions))}) when it was called again. It must draw only from"
    )
    raise DataError(
        f"{what} Python's, NumPy's and torch's global generators, which Varuna seeds for each sample. Look "
        "for separate generators (numpy.random.default_rng, torch.Generator, seed= of a collator), the time, "
        "or state kept between calls."
    )


def check_mixed_samples(source: SampleSource) -> None:
    """Refuse a ``collate`` that mixes samples at random: what becomes of one would depend on who is beside it.

    Raises:
        DataError: it does.
    """
    if _is_enough(source) and source.mixes_samples(range(_MIXED)):
        raise DataError(
            "collate= draws random numbers, and what it makes of a sample also depends on the other samples of the "
            "batch (mixup, cutmix and the like). Which samples share a micro-batch depends on its size, so training "
            "would, too. Mix in the dataset: let dataset[i] draw the other sample's number with Python's, NumPy's or "
            "torch's global generator, which Varuna seeds for each sample."
        )


def computes_over_batch(source: SampleSource) -> bool:
    """Return whether ``collate`` computes something over a batch, such as a norm, a mix or weights by counts."""
    end = _MIXED if source.size is None else min(LOOKED_AT, source.size)
    return _is_enough(source) and source.mixes_samples(range(end), drawing=False)


def _is_enough(source: SampleSource) -> bool:
    return source.size is None or source.size >= _MIXED


_MIXED = 3
