"""Garbage collections that come rarely, and leave out what was there before."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000
"""New ones between two collections."""
_OLDER = 5, 2
"""Collections of the new before one of what is older, and of those before one of everything."""


@contextmanager
def old_left_out() -> Iterator[None]:
    """Make collections rare in this block, and let them look at what was made in it only.

    A capture makes many objects: without this, a fifth of its time goes into looking through torch's again and again.
    """
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    if not frozen:  # else other code has done so, and means it
        gc.freeze()
    gc.set_threshold(_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        if not frozen:
            gc.unfreeze()


def collect_rarely() -> None:
    """Keep what this process has out of all collections, and collect what it makes only after many new objects.

    For servers: a look at all that a crowd of connections has stops them for tenths of a second. What they say makes no
    garbage that has to be looked for; a connection that ended leaves about 40 objects of it.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS, *_OLDER)
