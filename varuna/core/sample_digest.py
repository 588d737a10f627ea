"""The comparison of digests of samples that several machines have read.

Processors of several kinds round differently, as do the libraries that compute a spectrogram on them. So a digest is of
all that is exact, with a sketch of the floating-point numbers, which nearly equal ones have in common:

    bits  63 ... 40                      39 ... 20                        19 ... 0
          hash of keys, dtypes, shapes   projection on random signs,      logarithm of the norm,
          and of tensors without floats  over the norm                    per tensor, summed up
"""

FIELD = 2**20
"""Values of the projection, and of the logarithm: both wrap around."""
PROJECTION_STEPS, NORM_STEPS = 2**14, 2**11
"""For 1: of a projection, whose size is about 1, and of a logarithm to base 2."""
_PROJECTION_APART, _NORM_APART = 2**4, 2
"""Most steps by which rounding changes a sketch: a thousandth. Of other samples one in thousands is that near."""

OF_SETS = (
    "If the script goes through a set, as in enumerate(set(words)), the order differs in each process: sort it, or set "
    "PYTHONHASHSEED=0"
)
"""The likeliest reason that one script reads several sets of samples, and what to do."""


def is_same_sample(mine: int, theirs: int) -> bool:
    """Return whether two digests, signed or not, are of the same sample, rounded alike or not."""
    if mine == theirs:
        return True
    exact, projection, norm = (_apart(one, other) for one, other in zip(_parts(mine), _parts(theirs), strict=True))
    return not exact and projection <= _PROJECTION_APART and norm <= _NORM_APART


def begin_alike(mine: str, theirs: str) -> bool:
    """Return whether two runs begin with the same samples, by their digests in hexadecimal; empty: unknown."""
    return mine == theirs or bool(mine and theirs and is_same_sample(int(mine, 16), int(theirs, 16)))


def _parts(digest: int) -> tuple[int, int, int]:
    return digest // FIELD**2 % 2**24, digest // FIELD % FIELD, digest % FIELD


def _apart(one: int, other: int) -> int:
    return min((one - other) % FIELD, (other - one) % FIELD)
