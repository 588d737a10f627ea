"""Collections leave out what is old, for a while; afterwards nothing is different."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from varuna.process.garbage import old_left_out


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _not_frozen() -> Iterator[None]:
    """As in a process of a user's; tests begin with what is imported frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.nightly
def test_old_garbage_is_collected_after_the_block_and_new_garbage_within_it() -> None:
    gc.collect()
    old = Cycle()
    seen = weakref.ref(old)
    usual = gc.get_threshold()
    with old_left_out():
        new = weakref.ref(Cycle())
        del old
        gc.collect()
        assert new() is None
        assert seen() is not None
        with old_left_out():  # what is frozen stays so for the outer block
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == usual
    gc.collect()
    assert seen() is None
