"""For people whose data lies in shards, in a folder or a bucket: its place enters, samples by number leave.

Needs no torch. What reads samples does not know this package: it asks any dataset for ``index_at`` and ``prefetch``.
"""

from varuna.extras.shards.dataset import Shards

__all__ = ["Shards"]
