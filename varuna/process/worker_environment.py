"""Variables that a worker gets unless the user sets them."""

from typing import Final

DEFAULTS: Final = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",  # a pipe would hold back what a script prints, and a kill would lose it
    # With hashes of its own, each worker would go through a set of words in another order, and read other samples.
    "PYTHONHASHSEED": "0",
}
