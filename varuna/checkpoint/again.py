"""Damage is believed once it was seen twice: marks are for good, and a transfer or a server may err for a moment."""

import time
from collections.abc import Callable
from typing import TypeVar

from varuna.core.errors import DamagedCheckpoint, ObjectMissing

T = TypeVar("T")

AGAIN_S = 3.0
"""Between both looks: what was on its way when the first one went wrong is over by then."""


def seen_twice(look: Callable[[], T]) -> T:
    """Return what ``look`` finds, now or, if something is wrong or missing now, some seconds later.

    Raises:
        DamagedCheckpoint: it is wrong in the second look, too.
        ObjectMissing: it is missing in the second look.
        StoreError: the store cannot be read.
    """
    try:
        return look()
    except (DamagedCheckpoint, ObjectMissing):
        time.sleep(AGAIN_S)
        return look()
