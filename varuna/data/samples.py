"""Reading samples so that every stage that needs one sees the same values.

position p of the run     step p // M, and place p % M in its global batch of M samples
place                     p, or less where a ramp leaves positions out (``ramp``)
index i of dataset[i]     from the place by a shuffle of each epoch (``order``); all stages compute the same one
randomness                seeded from (seed, epoch, index): the same for any reader, in any plan
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from varuna.core.errors import DataError, OtherSampleError
from varuna.core.sample_digest import is_same_sample
from varuna.data.collate import CollateFunction, Collator, select, stack, stack_all
from varuna.data.columns import STEP, Columns, InputNames
from varuna.data.digests import row_digests, sample_digest
from varuna.data.micro_batch import MicroBatch
from varuna.data.order import sample_index
from varuna.data.placed_datasets import SETTERS, placed_datasets
from varuna.data.ramp import Ramp
from varuna.data.randomness import Draws, reseeded, states_kept
from varuna.data.readers import InThread, Readers
from varuna.data.sizes import SAMPLES, OpenSizes, equal_sizes, is_listed, lists_in, open_sizes
from varuna.data.slow import SlowReading

__all__ = ["MicroBatch", "SampleSource", "verify_digests"]

_RECIPE = (
    "Varuna reads samples by number, so that any worker can read any sample again: it needs dataset[i]. "
    "Wrap the stream map-style: read it into a list (list(stream)), or write it to files once and index them in "
    "__getitem__(i). If any position can be computed, define __getitem__(position) without __len__."
)


LOOKED_AT = 16
"""First samples of a run that are looked at before step 0: where there is padding, some of them show it."""
_BATCHES = (1, 2, 3, 4, 6)
"""Samples of each batch from which open sizes are found; as many together."""
_MOST_MISSING = 1000
"""Samples that may be None one after the other."""


class SampleSource:
    """A map-style dataset, read by position.

    With ``__len__`` the order is shuffled anew each epoch, by the dataset if it has ``index_at(position, seed)``;
    without, position i is ``dataset[i]``, unshuffled.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: CollateFunction | None = None,
        names: Callable[[], InputNames] | None = None,
        processes: int | None = 0,
        shuffles: bool = True,
        step_at: Callable[[int], int] | None = None,
        wants_step: Callable[[], bool] = lambda: False,
        ramp: Ramp | None = None,
    ) -> None:
        """Check the dataset, without reading a sample.

        Args:
            dataset: anything with ``dataset[i]``.
            seed: of order and of randomness.
            collate: makes named tensors of a list of samples.
            names: tells what ``forward`` takes; see ``Columns``.
            processes: how many read for a loader; 0: a thread does. None: a thread, which says if they would help.
            shuffles: anew in each epoch, if the dataset has a length.
            step_at: the step that has the sample at a position.
            wants_step: whether the job reads a column ``step``, which is added where the samples have none; asked once.
            ramp: which positions have samples; None: all.

        Raises:
            DataError: it is a stream, cannot be indexed, or is empty.
        """
        _check_dataset(dataset)
        self.size: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self.order_length: int | None = self.size or getattr(dataset, "order_length", None)
        """positions of an epoch; None: there are no epochs"""
        self._shuffles, self._step_at, self._ask_for_step = shuffles, step_at, wants_step
        if self.size == 0:
            raise DataError(f"the dataset ({type(dataset).__name__}) is empty: len(dataset) is 0. Check its source.")
        self._dataset, self._told, self._ramp = dataset, placed_datasets(dataset), ramp
        self._seed = seed
        self._columns = Columns(names)
        self._wait_for: Callable[[int], object] | None = getattr(dataset, "wait_for", None)
        watches = processes is None and self._wait_for is None  # no process that reads would make a sample come sooner
        self._processes, self._slow = processes, SlowReading() if watches else None
        self._reading: Readers | None = None
        self._collator = None if collate is None else Collator(collate, self._columns, seed)

    def indices(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the indices into the dataset of the samples at ``positions``, without reading them."""
        if self._ramp is not None:
            positions = [place for each in positions if (place := self._ramp.place(each)) is not None]
        if self.size is None or not self._shuffles:
            return tuple(positions)
        if (index_at := getattr(self._dataset, "index_at", None)) is not None:
            return tuple(index_at(position, self._seed) for position in positions)
        return tuple(sample_index(position, size=self.size, seed=self._seed) for position in positions)

    @property
    def setters(self) -> list[str]:
        """Methods of the dataset that are told where the run is."""
        known = {"set_epoch": self.order_length, "set_step": self._step_at}
        return [
            name
            for name in SETTERS
            if known[name] is not None and any(hasattr(type(each.dataset), name) for each in self._told)
        ]

    def announce(self, positions: Iterable[int]) -> None:
        """Tell a dataset that can read ahead (``prefetch``) what will be read soon."""
        if (prefetch := getattr(self._dataset, "prefetch", None)) is not None:
            prefetch(self.indices(tuple(positions)))

    def read(self, position: int) -> tuple[int, Any]:
        """Read index and contents of the sample at ``position``, with randomness seeded from (seed, epoch, index).

        Raises:
            Exception: whatever ``dataset[i]`` raises, with a note that names the index.
        """
        [index], [sample] = self._read_all([position])
        return index, sample

    def _read(self, position: int) -> tuple[int, Any]:
        with self._turn_of(position) as index:
            return index, self._dataset[index]

    @property
    def waits(self) -> bool:
        """Whether samples come while the run trains, and the dataset waits for them."""
        return self._wait_for is not None

    def draws(self, position: int) -> bool:
        """Return whether reading the sample at ``position`` draws random numbers from the global generators.

        Raises:
            Exception: whatever ``dataset[i]`` raises, with a note that names the index.
        """
        with states_kept(), self._turn_of(position) as index:
            draws = Draws()
            _ = self._dataset[index]
            return draws.were_made

    @contextmanager
    def _turn_of(self, position: int) -> Iterator[int]:
        """Tell the dataset, in this block, where the run is, and let it draw for this sample; yield the index."""
        [index], place = self.indices([position]), self._place(position)
        # By the dataset's own length: this epoch keys the sample's randomness, ``order_length`` only what a dataset is
        # told.
        epoch = 0 if self.size is None else place // self.size
        where = f"while reading dataset[{index}], position {position} of the run"
        if self.size is None:
            where += " (a dataset without __len__ must serve every position)"
        with _noted(where), reseeded(self._seed, "sample", epoch, index):
            for each in self._told:
                if self.order_length:
                    each.tell("set_epoch", place // self.order_length)
                if self._step_at is not None:
                    each.tell("set_step", self._step_at(position))
            yield index

    def _place(self, position: int) -> int:
        place = position if self._ramp is None else self._ramp.place(position)
        assert place is not None, f"position {position} has no sample"
        return place

    def _read_all(self, positions: Sequence[int]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        if self._wait_for is not None:  # here, since training needs the generators meanwhile
            for index in self.indices(positions):
                with _noted(f"while waiting for dataset[{index}]"):
                    self._wait_for(index)
        with states_kept():
            indices, samples = zip(*map(self._read, positions), strict=True)
        return indices, samples

    def micro_batch(
        self, positions: Sequence[int], keys: Iterable[str] | None = None, *, compared: bool = True
    ) -> MicroBatch:
        """Read and collate the samples at ``positions``.

        Args:
            positions: places in the run, at least one.
            keys: the inputs to return; None for all of them.
            compared: with digests of the samples.

        Raises:
            DataError: samples do not fit together, lack a key, or have a form that cannot become named tensors.
            Exception: whatever ``dataset[i]`` or ``collate`` raises, with a note that names the samples.
        """
        if self._ramp is None:
            return self._micro_batch(positions, keys, compared=compared)
        present = [position for position in positions if self._ramp.place(position) is not None]
        # The first position of the step always has a sample (a step has at least one).
        first = positions[0] // self._ramp.most * self._ramp.most
        found = self._micro_batch(present or [first], keys, compared=compared)
        # Without any, the first sample of the step is computed, and counts nothing.
        tensors = found.tensors if present else {**found.tensors, SAMPLES: torch.tensor(0)}
        lacking = len(positions) - len(found.indices)
        # Messages have a digest for each position, so positions without a sample repeat the last one.
        digests, indices = found.digests + found.digests[-1:] * lacking, found.indices + found.indices[-1:] * lacking
        return MicroBatch(tensors, digests, indices)

    def _micro_batch(self, positions: Sequence[int], keys: Iterable[str] | None, *, compared: bool) -> MicroBatch:
        indices, samples = self._read_all(positions)
        keys = None if keys is None else list(keys)
        if self._collator is None:
            named = [self._columns.tensors(each, f"dataset[{i}]") for each, i in zip(samples, indices, strict=True)]
            given = None if keys is None else self._without_step(keys, named[0])
            tensors = stack_all(named, indices, self._columns) if given is None else stack(named, indices, given)
            tensors = self._with_step(tensors, positions, keys)
            return MicroBatch(tensors, tuple(map(sample_digest, named)) if compared else (), indices)
        missing = all(sample is None for sample in samples)
        if missing:
            positions, samples = self._instead(positions)
        with _collating(indices):
            batch = self._collator.batch(samples, positions)
        if missing:
            batch[SAMPLES] = torch.tensor(0)
        chosen = select(batch, None if keys is None else self._without_step(keys, batch))
        digests = row_digests(batch, len(indices), sample_digest) if compared else ()
        there = [position for position, sample in zip(positions, samples, strict=True) if sample is not None]
        return MicroBatch(self._with_step(chosen, there, keys), digests, indices)

    @cached_property
    def _adds_step(self) -> bool:
        return self._step_at is not None and self._ask_for_step()

    def _without_step(self, keys: Iterable[str], given: Container[str]) -> list[str]:
        """Return the keys that samples must have."""
        return [key for key in keys if key != STEP or STEP in given or not self._adds_step]

    def _with_step(
        self, tensors: dict[str, Tensor], positions: Sequence[int], keys: Container[str] | None
    ) -> dict[str, Tensor]:
        if STEP in tensors or (keys is not None and STEP not in keys) or not self._adds_step:
            return tensors
        assert self._step_at is not None
        return {**tensors, STEP: torch.tensor([self._step_at(position) for position in positions])}

    def _instead(self, positions: Sequence[int]) -> tuple[list[int], tuple[Any, ...]]:
        """Find a sample for a micro-batch all of whose samples are None: it is computed, and counts nothing."""
        for position in range(positions[-1] + 1, positions[-1] + 1 + _MOST_MISSING):
            _, samples = self._read_all([position])
            if samples[0] is not None:
                return [position], samples
        raise DataError(
            f"from position {positions[0]} of the run on, {_MOST_MISSING} samples are None. Check the data."
        )

    def sizes(self, micro_batch: int | None = None) -> OpenSizes | None:
        """Find the sizes of collated batches that samples tell, as the first ones show them; None: there are none.

        Args:
            micro_batch: samples of every batch, if that is fixed; 1, where batches have a list with an entry for each.

        Raises:
            DataError: what ``collate`` returns has no form that can be captured.
        """
        if self._collator is None:
            return None
        seen = self._seen(_BATCHES)
        if is_listed(seen):
            each = micro_batch or 1
            return open_sizes(self._seen((each,) * max(2, LOOKED_AT // each)), lists=lists_in(seen))
        return open_sizes(seen)

    def telling(self, sizes: OpenSizes) -> dict[str, Tensor]:
        """Return a batch of the first samples whose open sizes can be told apart, if there is one."""
        counts = _BATCHES[1:] if sizes.samples is None else (sizes.samples,) * (LOOKED_AT // sizes.samples or 1)
        return min((batch for _, batch in self._seen(counts)), key=lambda batch: equal_sizes(batch, sizes))

    def _seen(self, counts: Sequence[int]) -> list[tuple[int, dict[str, Tensor]]]:
        """Return batches of these numbers of samples, from the first one on."""
        ends = itertools.accumulate(counts, initial=0)
        spans = [range(start, end) for start, end in itertools.pairwise(ends)]
        return [(len(span), self.micro_batch(span, compared=False).tensors) for span in spans]

    @property
    def may_miss(self) -> bool:
        """Whether a micro-batch may have fewer samples than positions: ``collate`` may leave some out."""
        return self._collator is not None or self._ramp is not None

    def prepare(self) -> None:
        """Fork the processes that read, before there is state that they would keep copies of."""
        _ = self._adds_step  # not in a process that reads
        self.reading()

    def reading(self) -> InThread | Readers:
        """Return what reads for a loader: the processes, which the first call starts, or the loader's thread."""
        if self._reading is None and self._processes:
            self._reading = Readers(self.micro_batch, self._processes)
        return self._reading or InThread(self.micro_batch, self._slow)

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def collates_alike(self, positions: Sequence[int]) -> bool:
        """Return whether ``collate`` makes the same of the same samples in a second call; without one, True."""
        if self._collator is None:
            return True
        indices, samples = self._read_all(positions)
        with _collating(indices):
            one, two = (row_digests(self._collator.batch(samples, positions), len(samples)) for _ in range(2))
        return one == two

    def mixes_samples(self, positions: Sequence[int], *, drawing: bool = True) -> bool:
        """Return whether ``collate`` makes something else of a sample when others are beside it.

        Args:
            positions: three or more.
            drawing: because it draws random numbers; False: in any way.
        """
        if self._collator is None:
            return False
        indices, samples = self._read_all(positions)
        with _collating(indices):
            look = self._collator.mixes if drawing else self._collator.computes_over
            return look(samples, positions[0])


def _of_sampler(loader: DataLoader[Any]) -> str:
    """Say how to keep an order that a loader's own sampler makes; nothing of the usual ones."""
    sampler = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    if type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler):
        return ""
    return (
        f" Its {type(sampler).__name__} would not be asked. To choose samples by weights or in an order of your own, "
        "pass a dataset without __len__: its __getitem__(position) gets the place in the run, from 0, and decides "
        "which sample that is, with a generator that is seeded by the position where it draws."
    )


def _check_dataset(dataset: Any) -> None:
    """Refuse what has no ``dataset[i]``, or whose ``dataset[i]`` is no sample.

    Raises:
        DataError: says what to do.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        if not isinstance(dataset.dataset, IterableDataset):
            raise DataError(
                "the dataset is a DataLoader, which makes batches itself. Pass loader.dataset: Varuna shuffles and "
                "batches its samples. If the loader has them, pass collate=loader.collate_fn and "
                f"num_workers=loader.num_workers too.{_of_sampler(dataset)}"
            )
        dataset, name = dataset.dataset, f"{type(dataset.dataset).__name__} in a DataLoader"
    if isinstance(dataset, Mapping) and dataset and all(isinstance(key, str) for key in dataset):
        first = next(iter(dataset))
        raise DataError(
            f"the dataset ({name}) is a dict with {', '.join(map(repr, dataset))}: pass one of them, such as "
            f"dataset[{first!r}]"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(f"the dataset ({name}) cannot be indexed. {_RECIPE}")


def verify_digests(mine: MicroBatch, theirs: Sequence[int], *, who: str, rank: int) -> None:
    """Compare the digests that travelled with a micro-batch with those of the samples read here.

    Args:
        mine: the micro-batch as this stage read it.
        theirs: digests of the other side.
        who: the other side, for the message, such as ``"stage 0"``.
        rank: the same.

    Raises:
        DataError: there are more or fewer.
        OtherSampleError: a sample differs.
    """
    if len(theirs) != len(mine.digests):
        raise DataError(f"{who} read {len(theirs)} samples for a micro-batch of {len(mine.digests)}")
    for index, own, other in zip(mine.indices, mine.digests, theirs, strict=True):
        if not is_same_sample(own, other):
            raise OtherSampleError(
                f"dataset[{index}] is not the same here and on {who} (digests {_hex(own)} and {_hex(other)}). All "
                "stages must read the same sample: dataset[i] must depend on i and on Python, NumPy and torch "
                "randomness only, which Varuna seeds for each sample, and so must collate=. Look for separate "
                "generators, time, process ids, state kept between calls, or files that differ between machines.",
                rank,
            )


@contextmanager
def _noted(note: str) -> Iterator[None]:
    """Add ``note`` to an exception that passes through."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


def _collating(indices: Sequence[int]) -> AbstractContextManager[None]:
    return _noted(f"while collating dataset indices {list(indices)}")


def _hex(digest: int) -> str:
    """Write a digest as people compare it."""
    return f"{digest & (1 << 64) - 1:016x}"
