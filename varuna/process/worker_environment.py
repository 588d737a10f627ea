"""Variables that a worker gets unless the user sets them."""

from typing import Final

DEFAULTS: Final = {
    "OMP_NUM_THREADS": "1",
    # With hashes of its own, each worker would go through a set of words in another order, and read other samples.
    "PYTHONHASHSEED": "0",
}
