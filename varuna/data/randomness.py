"""Python, NumPy and torch randomness, seeded for a moment and put back."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from varuna.data.keys import derive_key

__all__ = ["derive_key", "generator_lock", "seeded"]

# torch's default generator is one per process: the loader seeds it before dataset[i] and the engine before a
# section, each on its own thread. A thread that seeds it holds this lock for as long as the draws must be its own.
generator_lock = threading.RLock()


@contextmanager
def seeded(seed: int, *keys: int | str) -> Iterator[None]:
    """Run a block with all three generators seeded from ``(seed, *keys)``; their states come back afterwards.

    Holds ``generator_lock``. Only CPU generators are seeded: a dataset that draws on a GPU is not repeatable.
    """
    key = derive_key(seed, *keys)
    with generator_lock:
        python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            random.seed(key)
            np.random.seed((key & 0xFFFFFFFF, key >> 32))  # the legacy seed takes 32-bit words
            torch.default_generator.manual_seed(key)  # torch.manual_seed also visits every device: 100x the cost
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.default_generator.set_state(torch_)
