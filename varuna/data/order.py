"""The order of samples: random access into a fresh shuffle per epoch, in constant memory.

Position p of a run is place p % size of epoch p // size. A keyed permutation maps the place to an index::

    place = left * columns + right          left in [0, rows), right in [0, columns), rows * columns >= size
    left  += f(right, key 0)  mod rows      a Feistel network over a nearly square grid: each round can be
    right += f(left, key 1)   mod columns   undone, so the whole is a bijection of the grid
    ...
    index = left * columns + right          outside [0, size)? walk on: apply it again

The grid has less than one row more than needed, so walking on is rare.
"""

import hashlib
from functools import lru_cache
from math import isqrt

from varuna.core.errors import UsageError

_WORD = (1 << 64) - 1


def sample_index(position: int, *, size: int, seed: int) -> int:
    """Return the index into the dataset of the sample at ``position`` of a run.

    Each epoch of ``size`` positions visits every index once, in its own order.

    Args:
        position: place in the run, counted from 0 over all epochs; step s uses [s*M, (s+1)*M).
        size: ``len(dataset)``.
        seed: the run's seed.

    Raises:
        UsageError: ``position`` is negative or ``size`` is below 1.
    """
    if position < 0 or size < 1:
        raise UsageError(
            f"position {position} of {size} samples does not exist: position >= 0 and size >= 1 are needed"
        )
    epoch, index = divmod(position, size)
    rows, columns, keys = _network(seed, epoch, size)
    while True:
        left, right = divmod(index, columns)
        for left_key, right_key in keys:
            left = (left + _mix(right ^ left_key)) % rows
            # With the new ``left``: each half-round changes one coordinate by a function of the other, so it can be
            # undone.
            right = (right + _mix(left ^ right_key)) % columns
        index = left * columns + right
        if index < size:
            return index


@lru_cache(maxsize=4)
def _network(seed: int, epoch: int, size: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Return rows, columns and the key pairs of the rounds; cached, since neighbouring positions share an epoch."""
    # The smallest square side that holds ``size`` places, so that both coordinates mix evenly.
    rows = isqrt(size - 1) + 1
    digest = hashlib.blake2b(f"varuna order {seed} {epoch}".encode()).digest()
    words = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]
    return rows, -(-size // rows), tuple(zip(words[::2], words[1::2], strict=True))


def _mix(word: int) -> int:
    """Scatter 64 bits (the finalizer of splitmix64, Steele et al. 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
