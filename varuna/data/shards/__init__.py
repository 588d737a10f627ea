"""Data sets in shards, in a folder or a bucket: the place of one enters, samples by number leave.

Needs no torch. What reads samples does not know this package: it asks any dataset for ``index_at`` and ``prefetch``.
"""

from varuna.data.shards.dataset import Shards

__all__ = ["Shards"]
