"""Reading samples so that every stage that needs one sees the same values."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from varuna.core.errors import DataError
from varuna.data.collate import CollateFunction, Sample, check_collated, stack
from varuna.data.order import sample_index
from varuna.data.randomness import seeded

_RECIPE = (
    "Varuna reads samples by number, so that any worker can read any sample again: it needs dataset[i]. "
    "Wrap the stream map-style: read it into a list (list(stream)), or write it to files once and index them in "
    "__getitem__(i). If any position can be computed, define __getitem__(position) without __len__."
)


@dataclass(frozen=True)
class MicroBatch:
    """Samples that flow through the pipeline together.

    Attributes:
        tensors: the inputs that were asked for; the first dimension counts samples.
        digests: a signed 64-bit digest of each sample as the dataset returned it, all keys included.
        indices: index into the dataset of each sample.
    """

    tensors: dict[str, Tensor]
    digests: tuple[int, ...]
    indices: tuple[int, ...]


class SampleSource:
    """A map-style dataset, read by position.

    With ``__len__`` the order is shuffled anew each epoch; without, position i is ``dataset[i]``, unshuffled.
    """

    def __init__(self, dataset: Any, *, seed: int, collate: CollateFunction | None = None) -> None:
        """Check the dataset, without reading a sample.

        Raises:
            DataError: it is a stream, cannot be indexed, or is empty.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise DataError(f"the dataset ({type(dataset).__name__}) cannot be indexed. {_RECIPE}")
        self.size: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        if self.size == 0:
            raise DataError(f"the dataset ({type(dataset).__name__}) is empty: len(dataset) is 0. Check its source.")
        self._dataset = dataset
        self._seed = seed
        self._collate = collate

    def indices(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Indices into the dataset of the samples at ``positions``, without reading them."""
        if self.size is None:
            return tuple(positions)
        return tuple(sample_index(position, size=self.size, seed=self._seed) for position in positions)

    def sample(self, position: int) -> tuple[int, Sample]:
        """Index and contents of the sample at ``position``, with randomness seeded from (seed, epoch, index).

        Raises:
            DataError: the sample is not a dict of dense tensors.
            Exception: whatever ``dataset[i]`` raises, with a note that names the index.
        """
        epoch = 0 if self.size is None else position // self.size
        [index] = self.indices([position])
        where = f"while reading dataset[{index}], position {position} of the run"
        if self.size is None:
            where += " (a dataset without __len__ must serve every position)"
        with _noted(where), seeded(self._seed, "sample", epoch, index):
            sample = self._dataset[index]
        return index, _checked(sample, index)

    def micro_batch(self, positions: Sequence[int], keys: Iterable[str] | None = None) -> MicroBatch:
        """Read and collate the samples at ``positions``.

        Args:
            positions: places in the run, at least one.
            keys: the inputs to return; None for all of them.

        Raises:
            DataError: samples do not fit together, or lack a key.
            Exception: whatever ``dataset[i]`` or ``collate`` raises, with a note that names the samples.
        """
        indices, samples = zip(*map(self.sample, positions), strict=True)
        digests = tuple(map(sample_digest, samples))  # before collate, which may change them in place
        if self._collate is None:
            tensors = stack(samples, indices, _all_keys(samples) if keys is None else keys)
        else:
            with (
                _noted(f"while collating dataset indices {list(indices)}"),
                seeded(self._seed, "collate", *positions),
            ):
                batch = self._collate(list(samples))
            tensors = check_collated(batch, len(samples), keys)
        return MicroBatch(tensors=tensors, digests=digests, indices=indices)


def sample_digest(sample: Sample) -> int:
    """Signed 64-bit digest of keys, dtypes, shapes and bytes; the order of the keys does not matter."""
    digest = hashlib.blake2b(digest_size=8)
    for key in sorted(sample):
        tensor = sample[key].detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{len(key)}:{key}:{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    # Signed, so that digests can travel in an int64 tensor.
    return int.from_bytes(digest.digest(), "little", signed=True)


def verify_digests(mine: MicroBatch, theirs: Sequence[int], *, who: str) -> None:
    """Compare the digests that travelled with a micro-batch with those of the samples read here.

    Args:
        mine: the micro-batch as this stage read it.
        theirs: digests of the other side.
        who: the other side, for the message, such as ``"stage 0"``.

    Raises:
        DataError: a sample differs.
    """
    if len(theirs) != len(mine.digests):
        raise DataError(f"{who} read {len(theirs)} samples for a micro-batch of {len(mine.digests)}")
    for index, own, other in zip(mine.indices, mine.digests, theirs, strict=True):
        if own != other:
            raise DataError(
                f"dataset[{index}] is not the same here and on {who} (digests {_hex(own)} and {_hex(other)}). All "
                "stages must read the same sample: dataset[i] must depend on i and on Python, NumPy and torch "
                "randomness only, which Varuna seeds for each sample. Look for separate generators, time, process "
                "ids, state kept between calls, or files that differ between machines."
            )


def _checked(sample: object, index: int) -> Sample:
    """The sample, checked, as a dict.

    Raises:
        DataError: it is not a dict of dense tensors.
    """
    if not isinstance(sample, Mapping):
        raise DataError(
            f"dataset[{index}] must be a dict of tensors with the model's input names as keys, but is a "
            f"{type(sample).__name__}"
        )
    for key, value in sample.items():
        if not isinstance(key, str):
            raise DataError(f"dataset[{index}] must have the model's input names as keys, but has the key {key!r}")
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            kind = f"{value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"dataset[{index}][{key!r}] must be a dense tensor, but is a {kind}. "
                f"Convert it in the dataset, for numbers with torch.tensor(...)."
            )
    return dict(sample)


def _all_keys(samples: Sequence[Sample]) -> list[str]:
    """Every key of any sample, in order of appearance; ``stack`` refuses those that some sample lacks."""
    return list(dict.fromkeys(key for sample in samples for key in sample))


@contextmanager
def _noted(note: str) -> Iterator[None]:
    """Add ``note`` to an exception that passes through."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


def _hex(digest: int) -> str:
    """A digest in hexadecimal, for messages."""
    return f"{digest & (1 << 64) - 1:016x}"
