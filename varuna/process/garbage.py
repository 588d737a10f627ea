"""Garbage collections that leave out what was there before."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000
"""New ones between two collections."""


@contextmanager
def old_left_out() -> Iterator[None]:
    """Collections within the block are rare, and look at what was made within it only.

    A capture makes so many objects that a fifth of its time went into looking through those of torch again and again.
    """
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    if not frozen:  # else somebody else has done so, and means it
        gc.freeze()
    gc.set_threshold(_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        if not frozen:
            gc.unfreeze()
