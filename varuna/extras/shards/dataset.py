"""A data set in shards, in a folder or a bucket: indexable, so that any worker can read any sample again."""

import bisect
import hashlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from varuna.core.errors import DataError, StoreError, UsageError
from varuna.core.units import parse_bytes
from varuna.data.order import sample_index
from varuna.extras.shards.cache import ShardCache, total_bytes
from varuna.extras.shards.mds import INDEX, WORD_BYTES, Shard, sample_of, shards_of
from varuna.process.console import say_once
from varuna.process.threads import start
from varuna.store.base import Store
from varuna.store.opening import location, open_store

_CACHE = "varuna/shards"


class Shards:
    """A data set that MosaicML's ``MDSWriter`` wrote: ``dataset[i]`` is a dict of the columns.

    Shards are downloaded when they are needed, and some ahead: at the latest when a step begins that comes before the
    one whose samples they have. Processes of a machine share the copies.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        window: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
    ) -> None:
        """Read the index.

        Args:
            place: a folder, or a URL of S3, Google Cloud Storage or Azure Blob, with an ``index.json``.
            window: how many shards are shuffled together. Their order is shuffled anew in each epoch, and so are the
                samples of each window, so that two windows are needed at a time. Default: all samples of all shards.
                Another window is another order.
            cache: folder for copies. Default: one for this place below ``$XDG_CACHE_HOME/varuna/shards``.
            cache_bytes: bound on the copies, as a number or such as "20GB". What has not been used for longest is
                removed. Default: no bound.

        Raises:
            UsageError: the place is of an unknown kind, or ``cache_bytes`` is too little for ``window``.
            DataError: there is no index, it cannot be read, or shards have what cannot be read.
        """
        self._place, self._window = location(place), window
        self._stores: dict[int, Store] = {}
        try:
            index = self._store().get(INDEX)
        except StoreError as error:
            raise DataError(f"there is no data set at {self._place}: {error}. Shards need their {INDEX}") from error
        self._shards = shards_of(index, f"{self._place}/{INDEX}")
        self._ends = list(itertools.accumulate(shard.samples for shard in self._shards))
        bound = parse_bytes(cache_bytes, "cache_bytes") if isinstance(cache_bytes, str) else cache_bytes
        self._check(bound)
        folder = Path(cache) if cache is not None else _default_folder(self._place, index)
        self._cache = ShardCache(self._place, folder.absolute(), bound, self._store)
        self._at: tuple[int, int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._waiting: deque[int] = deque()
        self._queued: set[int] = set()
        self._lock, self._fetches = threading.Lock(), False

    def _check(self, bound_bytes: int | None) -> None:
        if self._window is not None and self._window < 1:
            raise UsageError(f"window={self._window} must be a number of shards, 1 or more")
        if bound_bytes is None:
            return
        count = len(self._shards) if self._window is None else min(2 * self._window, len(self._shards))
        needed = total_bytes(sorted(self._shards, key=lambda shard: -shard.raw.size_bytes)[:count])
        if needed > bound_bytes:
            what = (
                "all shards, which are shuffled together," if self._window is None else f"two windows of {self._window}"
            )
            largest = max(shard.raw.size_bytes for shard in self._shards)
            fitting = max(1, bound_bytes // (2 * largest))
            raise UsageError(
                f"cache_bytes={bound_bytes} is too little: {what} take {needed} bytes, and would be downloaded anew "
                f"each time. Allow more, or pass window={fitting} (shards that are shuffled together)"
            )

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the columns of a sample, in the order of the index over all shards.

        Raises:
            IndexError: there is none.
            DataError: its shard is missing or damaged, or its store has not answered for too long.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard, place = self._shard_of(index)
        # a shard begins with its number of samples, then where each begins, and where the last one ends
        head = WORD_BYTES * (1 + place)
        begin, end = np.frombuffer(self._cache.read(shard, head, 2 * WORD_BYTES), "<u4").tolist()
        if not begin <= end <= shard.raw.size_bytes:
            raise DataError(f"{shard.raw.name} of {self._place} is damaged: sample {place} has no place in it")
        try:
            return sample_of(shard, self._cache.read(shard, begin, end - begin))
        except (ValueError, LookupError, StopIteration) as error:
            raise DataError(f"sample {place} of {shard.raw.name} of {self._place} is damaged: {error}") from error

    def _shard_of(self, index: int) -> tuple[Shard, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._shards[number], index - (self._ends[number] - self._shards[number].samples)

    def fetch(self, name: str) -> None:
        """Get a copy of a shard.

        Raises:
            DataError: see ``__getitem__``.
        """
        for shard in self._shards:
            if shard.raw.name == name:
                self._cache.path(shard)

    # -- called by Varuna ---------------------------------------------------------------------------------

    def index_at(self, position: int, seed: int) -> int:
        """Return the index of the sample at a position of a run: each epoch has every sample once."""
        if self._window is None:
            return sample_index(position, size=len(self), seed=seed)
        # position -> (epoch, place in it) -> group of ``window`` shards -> sample of the group, shuffled within it
        epoch, place = divmod(position, len(self))
        order, ends = self._epoch(epoch, seed)
        group = bisect.bisect_right(ends, place)
        self._at = epoch, seed, group
        first = ends[group - 1] if group else 0
        inner = sample_index(place - first, size=ends[group] - first, seed=seed + 1 + epoch * len(ends) + group)
        for number in order[group * self._window : (group + 1) * self._window]:
            if inner < self._shards[number].samples:
                return self._ends[number] - self._shards[number].samples + inner
            inner -= self._shards[number].samples
        raise AssertionError("a window has as many samples as its shards")

    def _epoch(self, epoch: int, seed: int) -> tuple[list[int], list[int]]:
        """Return the shards in the order of an epoch, and where each window of them ends."""
        assert self._window is not None
        return _order(tuple(shard.samples for shard in self._shards), self._window, epoch, seed)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Download the shards of samples that will be read soon, and of the window after them; returns at once."""
        wanted = list(dict.fromkeys(bisect.bisect_right(self._ends, index) for index in indices))
        if self._window is not None and self._at is not None:
            epoch, seed, group = self._at
            order, ends = self._epoch(epoch, seed)
            if group + 1 < len(ends):
                wanted += order[(group + 1) * self._window : (group + 2) * self._window]
            else:
                wanted += self._epoch(epoch + 1, seed)[0][: self._window]
        with self._lock:
            fresh = [number for number in dict.fromkeys(wanted) if number not in self._queued]
            self._waiting.extend(fresh)
            self._queued.update(fresh)
            if self._waiting and not self._fetches:
                self._fetches = True
                start("shards", self._fetch)

    def _fetch(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._fetches = False
                    return
                number = self._waiting.popleft()
            try:
                self._cache.path(self._shards[number])
            except Exception as error:  # noqa: BLE001 - the reader that needs the shard will raise it, too
                say_once(f"a shard could not be downloaded ahead: {error}")
            with self._lock:
                self._queued.discard(number)

    # -- other processes ----------------------------------------------------------------------------------

    def _store(self) -> Store:
        """Return the store, opened in this process."""
        if os.getpid() not in self._stores:
            self._stores = {os.getpid(): open_store(self._place)}
        return self._stores[os.getpid()]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        kept = {key: value for key, value in vars(self).items() if key not in _OWN}
        return kept | {"_stores": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as after the index was read."""
        vars(self).update(state)
        self._begin()


_OWN = ("_waiting", "_queued", "_lock", "_fetches")


@lru_cache(maxsize=4)
def _order(samples: tuple[int, ...], window: int, epoch: int, seed: int) -> tuple[list[int], list[int]]:
    count = len(samples)
    # shards are drawn as samples are: a permutation of each epoch's own
    order = [sample_index(epoch * count + place, size=count, seed=seed) for place in range(count)]
    ends = list(itertools.accumulate(samples[number] for number in order))
    return order, [*ends[window - 1 :: window], *([ends[-1]] if count % window else [])]


def _default_folder(place: str, index: bytes) -> Path:
    """Return a folder for each state of a data set."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / _CACHE / hashlib.sha256(place.encode() + b"\n" + index).hexdigest()[:16]
