"""Samples in the order in which Hugging Face's Trainer reads them, and collators that pad to one length."""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from varuna.data.placed_datasets import placed_datasets
from varuna.data.randomness import seeded
from varuna.process.console import say_once

_OF_TOKENS = ("input_ids", "labels")


class Ordered:
    """A dataset in the order of a sampler. It has no ``__len__``, so that ``dataset[position]`` is read as it comes.

    Every epoch has whole steps. What the last one lacks is taken from the beginning of the epoch's order, as torch's
    ``DistributedSampler`` does.
    """

    def __init__(self, dataset: Any, sampler: Iterable[int], *, seed: int, kept: int, per_epoch: int) -> None:
        """Describe the order.

        Args:
            dataset: with ``dataset[i]``.
            sampler: gives the indices of an epoch; one with ``set_epoch`` is told which.
            seed: of samplers that draw from the global generators: they are seeded from it and the epoch.
            kept: how many of the sampler's indices an epoch uses.
            per_epoch: samples of an epoch, ``kept`` or more.
        """
        self._dataset, self._sampler, self._seed, self._kept = dataset, sampler, seed, kept
        self._per_epoch = per_epoch
        self.order_length = len(dataset)
        """on which the order depends, as on the length of other datasets"""
        self._lock, self._told = threading.Lock(), placed_datasets(dataset)
        self._order = lru_cache(maxsize=3)(self._ordered)

    def __getitem__(self, position: int) -> Any:
        epoch, place = divmod(position, self._per_epoch)
        for each in self._told:  # as the library's own loop does
            each.tell("set_epoch", epoch)
        order = self._order(epoch)
        return self._dataset[order[place % len(order)]]

    def _ordered(self, epoch: int) -> list[int]:
        with seeded(self._seed, "sampler", epoch), self._lock:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            return list(self._sampler)[: self._kept]


def one_length(collator: Callable[[list[Any]], Any], dataset: Any) -> Callable[[list[Any]], Any]:
    """Return a copy of a collator that pads to the longest of a batch, which pads to the longest of the dataset.

    The loss is the same, as padding is masked; every micro-batch has one shape. Other collators are returned as they
    are.
    """
    if getattr(collator, "padding", False) not in (True, "longest") or not hasattr(collator, "max_length"):
        return collator
    longest, shortest = _lengths(dataset)
    if not longest or longest == shortest:
        return collator
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    padded: Any = copy.copy(collator)
    padded.padding, padded.max_length = "max_length", -(-longest // multiple) * multiple
    say_once(f"samples are padded to {padded.max_length}, the longest of the dataset, not to the longest of a batch")
    return padded  # type: ignore[no-any-return]


def _lengths(dataset: Any) -> tuple[int, int]:
    """Return the largest and the smallest number of tokens in any sample; 0 if samples are not dicts of lists."""
    columns = getattr(dataset, "column_names", None) or ()
    if columns:
        values: Iterable[Any] = chain.from_iterable(dataset[key] for key in _OF_TOKENS if key in columns)
    else:
        rows = (dataset[index] for index in range(len(dataset)))  # each is read once: it may be made on the way
        values = (row[key] for row in rows if isinstance(row, Mapping) for key in _OF_TOKENS if key in row)
    found = [len(value) for value in values if hasattr(value, "__len__")]
    return max(found, default=0), min(found, default=0)
