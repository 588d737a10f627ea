"""The samples of each micro-batch, and the reading of them: a pure function of (seed, position).

Only what needs no torch is exported here; the submodules ``randomness``, ``samples`` and ``loader`` need it.
"""

from varuna.data.order import sample_index

__all__ = ["sample_index"]
