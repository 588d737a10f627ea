"""Downloads one shard, in a process of its own: ``python -m varuna.extras.shards.fetch PLACE FOLDER NAME [BYTES]``.

For processes that were forked from one that has used a bucket, such as readers: a request of theirs would hang.
"""

import sys

from varuna.core.errors import VarunaError
from varuna.extras.shards.dataset import Shards


def main(place: str, folder: str, name: str, bound_bytes: str | None = None) -> int:
    """Get a copy of the shard; say what went wrong."""
    try:
        # all bytes of two windows of one: the process that asks has checked what fits
        Shards(place, window=1, cache=folder, cache_bytes=bound_bytes).fetch(name)
    except VarunaError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
