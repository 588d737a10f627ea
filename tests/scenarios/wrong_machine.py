"""The job on a machine that is not dead but wrong, as ``WRONG`` of its environment says, or with a bug of its own.

``mount``: what the script opens first is not there. ``disk:N`` and ``strange:N``: the read of a sample after N others
fails, by an error that is a disk's, or by one that says nothing of machines. ``sums:N``: losses after N others are NaN.
``bug:I``: sample I cannot be read, here as anywhere.
"""

import errno
import math
import os
from collections.abc import Sequence
from typing import Any

import job  # type: ignore[import-not-found]  # beside this file

from varuna.engine.stage.losses import LossSums

KIND, _, NUMBER = os.environ.get("WRONG", "").partition(":")
_read = job.Sentences.__getitem__
_numbers = LossSums.numbers
_reads, _losses = [0], [0]


def read(dataset: Any, index: int) -> Any:
    _reads[0] += 1
    if KIND == "bug" and index == int(NUMBER):
        raise ValueError(f"sample {index} has no end")
    if KIND in ("disk", "strange") and _reads[0] > int(NUMBER):
        raise OSError(errno.EIO, os.strerror(errno.EIO)) if KIND == "disk" else ValueError("math domain error")
    return _read(dataset, index)


def numbers(sums: LossSums, row: Sequence[float]) -> list[float]:
    _losses[0] += 1
    found = _numbers(sums, row)
    return [math.nan, *found[1:]] if KIND == "sums" and _losses[0] > int(NUMBER) else found


if __name__ == "__main__":
    if KIND == "mount":
        open("/mnt/nowhere/data").close()
    job.Sentences.__getitem__, LossSums.numbers = read, numbers  # type: ignore[method-assign, assignment]
    job.main()
