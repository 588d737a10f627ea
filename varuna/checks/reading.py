"""Before step 0: does reading samples change those that are read later?

A dataset or ``collate`` that counts its calls, draws from a generator of its own, or keeps what it has drawn gives
other samples on each worker. Caches and counters that change no sample are harmless: what is compared are samples.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from varuna.checks.samples import refuse_random
from varuna.core.errors import DataError
from varuna.data.digests import tensors_digest
from varuna.data.samples import LOOKED_AT, SampleSource

_LONGEST_S = 0.5
"""For reading a block of samples, but for the first two."""
_FRESH = 4
"""Samples behind those that were looked at."""
_SERVED = 4
"""Samples that a dataset without length is asked for: others may come later."""
_JUMPS = (7, 100, 1_001, 1_000_003)
"""Blocks by which a count is put ahead."""
_BY_PLACE = (
    "Samples are read ahead, again when a step is repeated, and by several workers, so each must follow from its index "
    "and its place in the run"
)


class Place(Protocol):
    """A value in an object or a namespace."""

    @property
    def name(self) -> str:
        """As the user's code says it."""
        ...

    def value(self) -> Any:
        """Return what is there."""
        ...

    def write(self, value: Any) -> None:
        """Write there."""
        ...


class _Count(NamedTuple):
    """A number that rises by as much whenever the same samples are read."""

    place: Place
    now: Any
    rise: Any

    def put_ahead(self, blocks: int) -> None:
        """As if so many blocks had been read."""
        self.place.write(self.now + blocks * self.rise)


def check_reading(source: SampleSource, numbers: Callable[[], Iterable[Place]]) -> None:
    """Read some samples again and again.

    Args:
        source: reads them.
        numbers: finds those that the dataset and ``collate`` may count with, once samples have been read.

    Raises:
        DataError: they change.
    """
    if source.waits:
        return
    _check_kept_draws(source)
    expected = dict(_read(source, range(_end(source, LOOKED_AT))))
    places, values = list(numbers()), list[list[Any]]()
    for repeat in range(3):
        if repeat:
            _check_same(source, expected)
        values.append([each.value() for each in places])
    counts = [count for each, *seen in zip(places, *values, strict=True) if (count := _count(each, *seen)) is not None]
    if counts:
        _check_counts(source, counts, expected)
        _check_same(source, expected)


def _end(source: SampleSource, end: int) -> int:
    return min(end, _SERVED if source.size is None else source.size)


def _read(source: SampleSource, positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield positions with digests of their samples, until that takes too long."""
    begin_s = time.monotonic()
    for number, position in enumerate(positions):
        if number > 1 and time.monotonic() - begin_s > _LONGEST_S:
            return
        yield position, tensors_digest(source.micro_batch([position], compared=False).tensors)


def _check_same(source: SampleSource, expected: dict[int, int]) -> None:
    for position, digest in _read(source, expected):
        if digest != expected[position]:
            refuse_random(source, [position], source.indices([position])[0])


def _check_kept_draws(source: SampleSource) -> None:
    begin_s = time.monotonic()
    for position in range(LOOKED_AT, _end(source, LOOKED_AT + _FRESH)):
        try:
            keeps = source.draws(position) and not source.draws(position)
        except Exception:  # noqa: BLE001 - a sample that cannot be read: its step will say so
            continue
        if keeps:
            raise DataError(
                f"dataset[{source.indices([position])[0]}] drew random numbers when it was read for the first time, "
                f"and none when it was read again: it keeps what it has drawn. {_BY_PLACE}; another worker would draw "
                "something else. Keep what was loaded, and draw whenever a sample is read; or draw from a generator "
                "that the index seeds, such as random.Random(index)."
            )
        if time.monotonic() - begin_s > _LONGEST_S:
            return


def _count(place: Place, first: Any, then: Any, now: Any) -> _Count | None:
    is_number = isinstance(first, int | float) and type(first) is type(then) is type(now)
    return _Count(place, now, now - then) if is_number and now - then == then - first != 0 else None


def _check_counts(source: SampleSource, counts: Sequence[_Count], expected: dict[int, int]) -> None:
    """Put counts ahead, for a while."""
    names = " or ".join(count.place.name for count in counts)
    for jump in _JUMPS:
        for count in counts:
            count.put_ahead(jump)
        try:
            odd = [position for position, digest in _read(source, expected) if digest != expected[position]]
        except Exception:  # noqa: BLE001 - code that knows of no such count
            odd = []
        finally:
            for count in counts:
                count.put_ahead(0)
        if odd:
            raise DataError(
                f"dataset[{source.indices(odd[:1])[0]}] is another sample when {names}, which counts how often samples "
                f"are read, is larger. {_BY_PLACE}. To let it depend on the step or the pass, give the dataset a "
                "method set_step(step) or set_epoch(epoch), which readers call; or leave __len__ out: then it is "
                "asked for dataset[position]."
            )
